"""Backends of other distributions: how an unusable one is reported. The page's own runs in test_docs.py."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from catalog import backends, doctor
from catalog.backends import CUDA, GROUP, HIP, HOST, backend_of
from catalog.errors import BackendError, UsageError
from catalog.runtime.catalog import Catalog
from catalog.runtime.catalog_file import spec_path
from catalog.runtime.devices.host.device import host_archs
from catalog.settings import data_dir

ODD = """\
from catalog.backends import Backend

class Odd(Backend):
    isas = {"ARCH": "odd"}

    def target(self, arch):
        raise NotImplementedError

    def why_unavailable(self, arch):
        return "there is none"

BACKEND = Odd()
"""


@pytest.fixture
def install(install: Callable[[str, str | Path, str], None]) -> Callable[[str, str], None]:
    """Installs a distribution with one backend."""
    return lambda name, source: install(name, source, f"[{GROUP}]\nodd = {name}:BACKEND\n")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('no such GPU')", "SystemExit: no such GPU"),
        ("BACKEND = 'odd'", "broken:BACKEND is not a catalog.backends.protocol.Backend, but 'odd'"),
        (ODD.replace("def target", "def aim"), "TypeError: Can't instantiate abstract class Odd"),
        (ODD.replace("ARCH", "x86_64_v3"), "x86_64_v3 is an arch of the built-in backend host"),
        (ODD.replace("ARCH", "gfx9999"), "gfx9999 is an arch of the built-in backend hip"),
    ],
    ids=["import", "exit", "object", "abstract", "host", "gfx"],
)
def test_a_backend_that_cannot_be_used_is_reported_once_and_left_out(
    install: Callable[[str, str], None], caplog: pytest.LogCaptureFixture, source: str, reason: str
) -> None:
    install("broken", source)
    with caplog.at_level(logging.WARNING):
        assert backend_of("odd_arch") is HOST
        assert backend_of("odder_arch") is HOST
    (message,) = caplog.messages
    assert message.startswith(f"backend odd of broken 1.2 cannot be used: {reason}")
    (finding,) = doctor.about_plugins()
    assert finding[:2] == ("backend odd of broken 1.2", "unusable")
    assert finding.about.startswith(reason)


def test_the_command_line_tells_it_without_a_traceback(install: Callable[[str, str], None]) -> None:
    install("broken", "1 / 0")
    command = [sys.executable, "-m", "catalog", "populate", "--arch", "odd_arch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    warning, error, *_ = done.stderr.splitlines()
    assert warning == "Warning: backend odd of broken 1.2 cannot be used: ZeroDivisionError: division by zero"
    assert error == "Error: no arch is called 'odd_arch'"
    assert done.returncode == 2


def test_an_arch_has_one_backend(install: Callable[[str, str], None]) -> None:
    for name in ("first", "second"):
        install(name, ODD.replace("ARCH", "odd_arch"))
    with pytest.raises(BackendError) as raised:
        backend_of("odd_arch")
    for name in ("first", "second"):
        assert f"backend odd of {name} 1.2" in str(raised.value)


def test_an_arch_without_a_spec_is_no_arch(install: Callable[[str, str], None], tmp_path: Path) -> None:
    install("bare", ODD.replace("ARCH", "odd_arch"))
    with pytest.raises(UsageError, match="no arch is called 'odd_arch'"):
        Catalog(tmp_path / "catalog.db").populate("odd_arch")


def test_a_spec_beside_a_backend_extends_one_of_the_data_folder(
    install: Callable[[str, str], None], tmp_path: Path
) -> None:
    source = ODD.replace("ARCH", "odd_arch").replace(
        "    isas =", "    specs = Path(__file__).parent / 'specs'\n    isas ="
    )
    install("extending", f"from pathlib import Path\n{source}")
    path = tmp_path / "specs" / "native" / "odd_arch.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"extends": "host", "arch": "odd_arch", "hardware": {"vendor": "odd"}}')
    catalog = Catalog(tmp_path / "catalog.db")
    assert spec_path("odd_arch") == path
    extended = json.loads((data_dir() / "arch_specs" / "native" / "host.json").read_text())
    assert set(catalog.spec("odd_arch").enumerations) == set(extended["enumerations"])


def test_archs_of_built_in_backends_ask_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backends, "plugins")
    assert [backend_of(arch) for arch in ("gfx950", "sm_90", "host", *host_archs())][:3] == [HIP, CUDA, HOST]
    assert all(backend_of(arch) is HOST for arch in host_archs())
