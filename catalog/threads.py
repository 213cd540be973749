"""How many threads a host kernel may have."""

from __future__ import annotations

import contextlib
import os
import resource

from catalog.errors import UsageError

_PER_CORE = 16
_LEAST_LIMIT = 64


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_threads() -> int:
    """The largest number of threads that a kernel may have.

    16 for each core that the process may use, or 64 if that is more, but no more than the user may have
    (``ulimit -u``): OpenMP ends the process when the system refuses a thread.
    """
    limit = max(_LEAST_LIMIT, _PER_CORE * usable_cores())
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed))


def allowed(number: int) -> int:
    """``number``, if a kernel may have that many threads; 0 stands for :func:`default_threads`.

    Raises:
        ValueError: it is negative, or more than :func:`most_threads`.
    """
    most = most_threads()
    if not 0 <= number <= most:
        raise ValueError(
            f"expected an integer from 0, every core, to {most}: {_PER_CORE} threads a core, at least {_LEAST_LIMIT}, "
            "and no more than ulimit -u allows"
        )
    return number


def checked(number: int) -> int:
    """As :func:`allowed`, for a caller's argument.

    Raises:
        UsageError: that many threads are not allowed.
    """
    try:
        return allowed(number)
    except ValueError as error:
        raise UsageError(f"num_threads={number}: {error}") from None


def default_threads() -> int:
    """The default number of threads of a kernel: that of ``OMP_NUM_THREADS``, else one for each usable core."""
    with contextlib.suppress(ValueError):
        wanted = int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
        if wanted > 0:
            return min(wanted, most_threads())
    return min(usable_cores(), most_threads())
