"""Limits and default of a host kernel's number of threads."""

from __future__ import annotations

import contextlib
import os
import resource

from catalog.errors import UsageError

_PER_CORE = 16
_LEAST_LIMIT = 64


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_threads() -> int:
    """The maximum number of threads of a kernel.

    16 for each core that the process may use, or 64 if that is more, but at most the user's limit (``ulimit -u``).
    """
    limit = max(_LEAST_LIMIT, _PER_CORE * usable_cores())
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return limit if allowed == resource.RLIM_INFINITY else max(1, min(limit, allowed))


def allowed(number: int) -> int:
    """Return ``number`` if a kernel may have that many threads; 0 stands for :func:`default_threads`.

    Raises:
        ValueError: it is negative, or more than :func:`most_threads`.
    """
    most = most_threads()
    if not 0 <= number <= most:
        raise ValueError(
            f"expected an integer from 0 (every core) to {most}: {_PER_CORE} threads per core or {_LEAST_LIMIT}, "
            "whichever is more, within ulimit -u"
        )
    return number


def checked(number: int) -> int:
    """Like :func:`allowed`, for a caller's argument.

    Raises:
        UsageError: that many threads are not allowed.
    """
    try:
        return allowed(number)
    except ValueError as error:
        raise UsageError(f"num_threads={number}: {error}") from None


def default_threads() -> int:
    """The default number of threads of a kernel: ``OMP_NUM_THREADS``, else one per usable core."""
    with contextlib.suppress(ValueError):
        wanted = int(os.environ.get("OMP_NUM_THREADS", "").partition(",")[0])
        if wanted > 0:
            return min(wanted, most_threads())
    return min(usable_cores(), most_threads())
