"""The remote cache: what one machine compiles, no other compiles again; and nothing that it does wrong is loaded."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster_processes import wait_until
from command import catalog
from conftest import missing
from remote_store import Fault, Store
from rough import FORK
from tiny_project import Project, answer_of, make_kernel, make_project

from catalog.build import remote
from catalog.build.builder import Artifact
from catalog.build.cache import Cache
from catalog.build.offline_builder import OfflineBuilder
from catalog.build.remote import Remote
from catalog.build.signatures import new_key
from catalog.errors import MissingKernelError, UsageError
from catalog.settings import settings

for package in ("aiohttp", "cryptography", "fsspec"):
    if importlib.util.find_spec(package) is None:
        missing(f"the package {package}")


@dataclass
class Site:
    """A project to build from, a server to share with, and the settings of the machine at hand."""

    project: Project
    store: Store
    folder: Path
    caplog: pytest.LogCaptureFixture
    patch: pytest.MonkeyPatch

    def configure(self, **values: object) -> None:
        """Change settings: ``configure(remote=url)``; None unsets."""
        for name, value in values.items():
            self.patch.setenv(f"CATALOG_{name.upper()}", "" if value is None else str(value))
        settings.cache_clear()

    def build(self, machine: str, hdim: int = 64) -> Artifact:
        """Build a kernel on a machine, which is a cache."""
        artifact = self.project.builder(self.folder / machine).build(make_kernel(hdim))
        assert answer_of(artifact.path) == 1000 + hdim
        assert artifact.path.parent == self.folder / machine
        assert not list((self.folder / machine / "tmp").iterdir())
        return artifact

    def forbid_compiling(self) -> None:
        """Only the headers can still be listed."""
        self.project.launch_with(self.folder / "no-compiler", 'case " $* " in *" -M "*) exec "$@";; esac; exit 1')

    @property
    def warnings(self) -> list[str]:
        return [record.getMessage() for record in self.caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def site(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site(make_project(tmp_path), Store(), tmp_path, caplog, monkeypatch)
    site.configure(remote=site.store.url)
    yield site
    site.store.close()
    settings.cache_clear()


@pytest.fixture
def made(site: Site) -> Artifact:
    """A kernel that another machine has compiled and written to the store."""
    site.configure(remote_write=True)
    made = site.build("first")
    site.configure(remote_write=None)
    return made


def test_what_one_machine_compiles_another_fetches(site: Site, made: Artifact) -> None:
    site.forbid_compiling()
    records = []
    fetched = site.project.builder(site.folder / "second", records.append).build(make_kernel())
    assert (fetched.key, fetched.sha256, fetched.cached) == (made.key, made.sha256, True)
    assert [record.compile_s for record in records] == [made.compile_seconds], "the registry records it"
    site.store.requests.clear()
    assert site.build("second").cached
    assert not site.store.requests, "what the local cache has is not looked for"


@pytest.mark.slow
def test_a_machine_that_may_not_write_only_reads(site: Site) -> None:
    assert not site.build("cache").cached
    assert site.store.requests == ["GET .kernel"]


@pytest.mark.slow
def test_a_machine_without_a_compiler_gets_the_newest_library_of_the_row(site: Site, made: Artifact) -> None:
    stored = OfflineBuilder(site.folder / "runner", targets=lambda arch: site.project.target)
    assert answer_of(stored.build(make_kernel()).path) == 1064
    with pytest.raises(MissingKernelError, match="is not in the cache"):
        stored.build(make_kernel(128))

    site.project.write("abi.h", "#define CATALOG_ABI_VERSION 2\n")
    other = OfflineBuilder(site.folder / "other", targets=lambda arch: site.project.target)
    with pytest.raises(MissingKernelError, match="is not in the cache"):  # its libraries have another ABI
        other.build(make_kernel())


# What is not as it was written is not loaded


def flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def other_key(content: bytes) -> bytes:
    head, _, library = content.partition(b"\n")
    fields = json.loads(head)
    fields["entry"]["record"]["key"] = "0" * 64
    return json.dumps(fields).encode() + b"\n" + library


DAMAGES: dict[str, list[Callable[[bytes], bytes]]] = {
    "its library differs from the one that was built": [flip],
    "its library is incomplete": [lambda content: content[:-100], lambda content: content + b"x"],
    "its record is damaged": [
        lambda content: content[:200],
        lambda content: b"",
        lambda content: content.replace(b"compile_s", b"compile_t", 1),
    ],
    "its record differs from the one that was written": [other_key],
}


def test_a_damaged_entry_is_reported_and_ignored_until_it_is_replaced(site: Site, made: Artifact) -> None:
    sound, store = site.store.objects[site.store.entry], Remote(site.store.url)
    for reason, damages in DAMAGES.items():
        for damage in damages:
            site.caplog.clear()
            site.store.objects[site.store.entry] = damage(sound)
            assert store.get(made.key, site.folder) is None
            assert site.warnings == [f"{site.store.url}/{made.key}.kernel is ignored: {reason}"]
    site.configure(remote_write=True)
    assert not site.build("second").cached
    assert site.build("third").cached


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["refuses", "dies", "hangs", "endless"])
def test_a_server_that_fails_is_left_alone_after_one_line(fault: Fault, site: Site) -> None:
    site.store.fault = fault
    site.store.objects[f"/kernels/{'0' * 64}.kernel"] = bytes(1000)
    cache, store = Cache(site.folder / "cache"), Remote(site.store.url, timeout=0.2)
    cache.create()
    for _ in range(2):
        assert store.fetch("0" * 64, cache, threading.Event()) is None
    wait_until(lambda: site.store.requests, "the request, which may leave a busy machine after its time limit")
    (line,) = site.warnings
    assert line.startswith(f"the remote cache {site.store.url} cannot be used (")
    assert line.endswith("); going on with the local cache alone")
    assert len(site.store.requests) == 1
    assert not cache.keys()
    assert not list(cache.tmp.iterdir())

    site.store.fault = ""
    site.patch.setattr(remote, "RETRY_SECONDS", 0.0)  # a minute later
    store.fetch("0" * 64, cache, threading.Event())
    wait_until(lambda: len(site.store.requests) == 2, "another request")


@pytest.mark.slow
def test_without_a_network_kernels_are_compiled(site: Site) -> None:
    site.configure(remote="http://me:secret@127.0.0.1:9/kernels", remote_write=True)
    assert not site.build("cache").cached
    (line,) = site.warnings
    assert "http://127.0.0.1:9/kernels cannot be used (" in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/kernels", "not a URL, such as s3://bucket/kernels"),
        ("nosuch://bucket", "Protocol not known: nosuch"),
    ],
)
def test_a_url_that_can_never_work_is_a_usage_error(url: str, message: str, site: Site) -> None:
    site.configure(remote=url)
    with pytest.raises(UsageError, match=message):
        site.build("cache")


# Signatures


@pytest.mark.slow
def test_with_signers_only_signed_entries_are_used(site: Site, made: Artifact) -> None:
    ours = catalog("keys", "new", site.folder / "ours.key", "--comment", "nightly build").stdout
    new_key(site.folder / "theirs.key", "")
    (site.folder / "signers").write_text(f"# machines that build\n{ours}")
    assert catalog("keys", "show", site.folder / "ours.key").stdout.split() == ours.split()[:2]

    def fetched(machine: str) -> bool:
        site.configure(remote_signers=site.folder / "signers", remote_key=None)
        return site.build(machine).cached

    def push(key: str) -> None:
        site.configure(remote_signers=None, remote_key=site.folder / key, cache_dir=site.folder / "first")
        done = catalog("cache", "push", "--replace")
        assert done.stdout == f"1 library -> {site.store.url}, 0 already there\n", done

    assert not fetched("unsigned")
    push("theirs.key")
    assert not fetched("of-others")
    push("ours.key")
    assert fetched("of-ours")

    head, _, library = site.store.objects[site.store.entry].partition(b"\n")
    fields = json.loads(head)
    value = fields["signature"]["value"]
    fields["signature"]["value"] = ("A" if value[0] != "A" else "B") + value[1:]
    site.store.objects[site.store.entry] = json.dumps(fields).encode() + b"\n" + library
    assert not fetched("forged")
    assert [line.partition(" is ignored: ")[2] for line in site.warnings] == [
        "it is not signed, and CATALOG_REMOTE_SIGNERS demands a signature",
        "it is signed with a key that CATALOG_REMOTE_SIGNERS does not list",
        "its signature is not of this record",
    ]


@pytest.mark.slow
def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    key, other = tmp_path / "a.key", tmp_path / "b.key"
    assert catalog("keys", "new", key).returncode == 0
    assert key.stat().st_mode & 0o777 == 0o600
    assert "exists" in catalog("keys", "new", key).stderr
    assert "No such file" in catalog("keys", "show", other).stderr
    other.write_text("no key")
    other.chmod(0o600)
    assert "is not a private key of catalog keys" in catalog("keys", "show", other).stderr
    key.chmod(0o644)
    done = catalog("keys", "show", key)
    assert done.returncode == 2
    assert "is open to others (mode 0644)" in done.stderr


# Filling and fetching, from many machines


@pytest.mark.slow
def test_push_fills_a_remote_cache_from_a_local_one(site: Site) -> None:
    site.configure(remote=None)
    assert "there is no remote cache" in catalog("cache", "push").stderr
    for hdim in (32, 64):
        site.build("first", hdim)
    site.configure(remote=f"file://{site.folder}/remote", cache_dir=site.folder / "first")
    assert catalog("cache", "push").stdout == f"2 libraries -> file://{site.folder}/remote, 0 already there\n"
    assert catalog("cache", "push").stdout == f"0 libraries -> file://{site.folder}/remote, 2 already there\n"
    site.forbid_compiling()
    assert site.build("second", 32).cached
    assert f"file://{site.folder}/remote" in catalog("cache", "path").stdout

    site.configure(remote="http://127.0.0.1:9/kernels")
    done = catalog("cache", "push")
    assert done.returncode == 1
    assert "the remote cache http://127.0.0.1:9/kernels cannot be used (" in done.stderr


@pytest.mark.slow
def test_16_clients_at_once(site: Site) -> None:
    """All write the same entry at first; then none compiles."""
    site.configure(remote_write=True, remote_timeout=60)

    def all_build(name: str) -> None:
        clients = [FORK.Process(target=site.build, args=(f"{name}-{number}",)) for number in range(16)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(120)
        assert [client.exitcode for client in clients] == [0] * 16

    all_build("first")
    assert len(site.store.objects) == 2
    site.forbid_compiling()
    all_build("second")


@pytest.mark.slow
def test_an_s3_bucket(site: Site) -> None:
    """Needs the extra ``s3-tests``, 100 MB, which ``dev`` leaves out."""
    try:
        import boto3
        from moto.server import ThreadedMotoServer
    except ImportError:
        missing("the extra s3-tests")
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            site.patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="bucket")
        site.configure(remote="s3://bucket/kernels", remote_write=True, remote_timeout=60)
        made = site.build("first")
        assert not made.cached
        assert Remote("s3://bucket/kernels").has(made.key)
        site.forbid_compiling()
        assert site.build("second").cached
        assert not site.warnings

        site.configure(remote="s3://no-such-bucket/kernels")
        site.configure(cache_dir=site.folder / "first")
        done = catalog("cache", "push")
        assert done.returncode == 1
        assert "the remote cache s3://no-such-bucket/kernels cannot be used (" in done.stderr
    finally:
        server.stop()
