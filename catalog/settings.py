"""Every environment variable of the project, typed, in one place."""

from __future__ import annotations

import os
import re
import shlex
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from catalog import threads

APP = "kernel-catalog"

CACHE_MAX_BYTES = 10 * 2**30
"""About 10,000 libraries for host CPUs, or 2,000 for AMD GPUs."""

TRACE_MAX_BYTES, TRACE_MAX_CALLS = 2**30, 100_000
"""Default limits of a trace."""


def _default_db() -> Path:
    return platformdirs.user_data_path(APP) / "catalog.db"


def _default_cache_dir() -> Path:
    return platformdirs.user_cache_path(APP)


def _splits(command: str) -> str:
    if not shlex.split(command):  # raises ValueError if a quotation is not closed
        raise ValueError("no command")
    return command


Command = Annotated[str, AfterValidator(_splits)]
"""A program and its arguments, in shell syntax."""


def _is_url(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s:]\S*", text):
        raise ValueError("not a URL, such as s3://bucket/kernels or file:///shared/kernels")
    return text


Url = Annotated[str, AfterValidator(_is_url)]
"""A URL with a scheme."""

Threads = Annotated[int, AfterValidator(threads.allowed)]


class Settings(BaseModel):
    """The settings; each is named like its variable, without ``CATALOG_`` and in lower case."""

    model_config = ConfigDict(frozen=True)

    db: Path = Field(default_factory=_default_db, description="the catalog: one SQLite file")
    cache_dir: Path = Field(default_factory=_default_cache_dir, description="folder of the compiled kernels")
    cache_locks: Literal["auto", "flock", "lease"] = Field(
        "auto", description="cache locks: flock for a local disk, lease for one shared by machines; auto: detect"
    )
    cache_max_bytes: int = Field(
        CACHE_MAX_BYTES,
        ge=0,
        description="size limit of the cache in bytes; the least recently used libraries go first; 0: no limit",
    )
    choices: Path | None = Field(
        None, description="file of frozen choices: select from it alone, without a catalog or a compiler"
    )
    data_dir: Path | None = Field(None, description="folder of arch specs and parity lists to use instead of our own")
    cxx: str | None = Field(None, description="C++ compiler for host kernels (default: g++, then clang++, then c++)")
    ck_root: Path | None = Field(None, description="checkout of composable_kernel, for kernels of AMD archs")
    rocm_path: Path | None = Field(
        None, description="ROCm installation (default: ROCM_PATH, then /opt/rocm, then /usr)"
    )
    hipcxx: str | None = Field(None, description="HIP compiler (default: ROCm's clang++, then the newest clang++)")
    hipcxx_device: Command | None = Field(
        None,
        description="command of a newer clang, for archs that the HIP compiler does not know (default: zig on PATH, "
        "then the Python package ziglang)",
    )
    nvcc: str | None = Field(
        None, description="CUDA compiler (default: nvcc on PATH, /usr/local/cuda, then the Python packages)"
    )
    compiler_launcher: Command | None = Field(
        None, description="prefix of every compiler call: ccache, sccache, distcc"
    )
    remote: Url | None = Field(
        None,
        description="URL of a cache that machines share, read before anything is compiled: file://, http(s)://, s3://, "
        "gs:// (default: none)",
    )
    remote_write: bool = Field(False, description="true: write to the remote cache what is compiled here")
    remote_timeout: float = Field(
        10.0, gt=0, le=3_600, description="time limit of each transfer from or to the remote cache in seconds"
    )
    remote_key: Path | None = Field(
        None, description="private key of catalog keys, which signs what is written to the remote cache"
    )
    remote_signers: Path | None = Field(
        None, description="file of public keys: entries of the remote cache that none of them signed are ignored"
    )
    compile: bool = Field(True, description="false: start no compiler, use only the kernels in the cache")
    guard: Literal["first_run", "never"] = Field(
        "first_run", description="first_run: a library new to this machine runs in a separate process first"
    )
    guard_timeout: float = Field(
        60.0,
        gt=0,
        description="time limit of such a first run in seconds; on a GPU each launch gets a sixtieth of it",
    )
    quarantine_days: float = Field(
        30.0, gt=0, le=36_500, description="days until a kernel that failed in its first run is tried again"
    )
    num_threads: Threads = Field(
        0, description="threads of a host kernel, at most 16 per core or 64; 0: OMP_NUM_THREADS, else every core"
    )
    measured_as: Literal["eager", "graph"] = Field(
        "graph",
        description="timings that selection uses, and tuning makes: eager counts what a caller waits for, graph the "
        "device's time alone; while a graph is captured, it is graph",
    )
    measured_cold: bool = Field(False, description="true: use timings with caches emptied before every launch")
    allow_foreign: bool = Field(
        False, description="true: functions for PyTorch may call another project's kernel that was measured as faster"
    )
    record_misses: bool = Field(True, description="record problems that are selected but were never measured")
    trace: Path | None = Field(None, description="file to record every call of a plan in (default: none)")
    trace_tensors: int = Field(0, ge=0, description="number of calls per problem whose inputs a trace keeps")
    trace_max_bytes: int = Field(TRACE_MAX_BYTES, ge=0, description="maximum bytes of inputs that a process keeps")
    trace_max_calls: int = Field(TRACE_MAX_CALLS, ge=0, description="maximum number of calls that a process records")
    query_timeout: float = Field(10.0, gt=0, description="time limit of a query expression in seconds")
    query_memory: int = Field(
        2**30, ge=2**20, le=2**50, description="memory limit of a query in bytes, sorted rows included"
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process, read once from ``CATALOG_*`` variables; an empty variable counts as unset.

    Raises:
        UsageError: a variable has an invalid value; the message names the variable.
    """
    from pydantic import ValidationError

    from catalog.errors import UsageError
    from catalog.messages import expected

    variables = {field: os.environ.get(f"CATALOG_{field.upper()}") for field in Settings.model_fields}
    try:
        return Settings(**({field: text for field, text in variables.items() if text} | _chosen))
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        name, about = f"CATALOG_{field.upper()}", Settings.model_fields[field].description
        raise UsageError(f"{name}={first.get('input')!r}: {expected(first)}", hint=f"It sets: {about}.") from None


_chosen: dict[str, Any] = {}


def choose(**values: object) -> None:
    """Override settings from the command line: values other than None take precedence for the rest of the process."""
    _chosen.update((name, value) for name, value in values.items() if value is not None)
    settings.cache_clear()


def data_dir() -> Path:
    """Folder of arch_specs/, parity/, shapes/: package data when installed, the source tree's data/ in a checkout."""
    return settings().data_dir or _own_data_dir()


@cache
def _own_data_dir() -> Path:
    package = Path(__file__).parent
    installed = package / "_data"
    return installed if installed.is_dir() else package.parent / "data"


def rocm_path() -> Path | None:
    """ROCm's folder as stated by the setting, or by ROCm's own variable ``ROCM_PATH``; None if neither is set."""
    chosen = os.environ.get("ROCM_PATH")
    return settings().rocm_path or (Path(chosen) if chosen else None)
