"""The catalog's kernels against other projects' implementations: called, checked, timed, ranked and chosen."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import command
import pytest
from conftest import forget_packages, missing

from catalog.errors import DeviceError, UsageError
from catalog.foreign import installed as lookup
from catalog.ops import operation
from catalog.ops.attention.implementations import IMPLEMENTATIONS
from catalog.ops.attention.problem import Problem
from catalog.registry import foreign
from catalog.registry.rows import ForeignTiming
from catalog.report.winners import winners
from catalog.runtime.against import check, entrant
from catalog.runtime.bench_shapes import expected_of
from catalog.runtime.catalog import Catalog
from catalog.runtime.devices.host import device
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.measure import Measurement, StopRule
from catalog.runtime.tune import Tuned, TuneOptions, tune
from catalog.schema.policy import MeasuredAs, Policy
from catalog.settings import settings

try:
    import torch
except ImportError:
    missing("torch")

from catalog.torch import scaled_dot_product_attention

KNOWN = {one.name: one for one in IMPLEMENTATIONS}

SLOW_US = 15
"""CPU time of the stand-in of :data:`STAND_IN`: longer than a small kernel, shorter than binding its tensors."""

STAND_IN = f"""
import time
from catalog.ops.attention.implementations import Sdpa


class Steady(Sdpa):
    name, title, distribution = "steady", "Steady", "steady"
    wrong = False

    def call(self, problem, tensors):
        compute = super().call(problem, tensors)

        def steady():
            until = time.thread_time_ns() + {SLOW_US * 1000}
            o = compute()
            while time.thread_time_ns() < until:
                pass
            return 2 * o if self.wrong else o

        return steady


STEADY = Steady()
"""


def problem(**fields: Any) -> Problem:
    """One as the function for PyTorch states it, LSE included."""
    return Problem(
        **{"batch": 1, "nhead_q": 1, "seqlen_q": 4, "hdim_q": 32, "dtype": "fp32", "mask": "causal", "lse": True}
        | fields
    )


@pytest.fixture
def catalog(host_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    """A catalog on a device whose clock is this thread's CPU time: other work on the machine does not count."""
    monkeypatch.setattr(HostDevice, "waits", lambda _: {})
    monkeypatch.setattr(device, "time", SimpleNamespace(perf_counter_ns=time.thread_time_ns))
    catalog = Catalog(shutil.copy(host_file, tmp_path / "catalog.db"), num_threads=1)
    yield catalog
    catalog.close()


@pytest.fixture
def steady(install: Callable[[str, str, str], None]) -> ModuleType:
    """A package that brings a correct implementation which always takes :data:`SLOW_US`."""
    install("steady", STAND_IN, "[catalog.implementations]\nsteady = steady:STEADY\n")
    forget_packages()
    return __import__("steady")


def tuned(catalog: Catalog, asked: Problem, measured_as: MeasuredAs) -> Tuned:
    """Tuned again as long as the times are too noisy to be recorded, which a busy machine may make them."""
    rule = StopRule(precision=0.3, seconds=2, warm_up_seconds=0.01, measured_as=measured_as)
    for _ in range(20):
        (done,) = tune(catalog, [asked], TuneOptions(candidates=1, rule=rule, against=("steady",))).tuned
        if done.best is not None:
            break
    return done


def set_up(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"CATALOG_{name.upper()}", str(value))
    settings.cache_clear()


@pytest.mark.slow
def test_a_host_heavy_plan_wins_in_a_graph_and_loses_in_eager(
    catalog: Catalog, steady: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel takes 4 us; a call of its plan, on NumPy arrays, takes 60."""
    monkeypatch.setattr("catalog.runtime.deployed.has_torch", lambda: False)
    asked = problem()
    graph, eager = tuned(catalog, asked, "graph"), tuned(catalog, asked, "eager")
    (ours,) = graph.kernels
    assert (graph.best or ("",))[0] == ours
    assert (eager.best or ("",))[0] == "foreign:steady"
    assert graph.name_of("foreign:steady") == "Steady 1.2"
    for done in (graph, eager):
        assert done.medians["foreign:steady"] >= SLOW_US / 1e3
    assert tuned(catalog, asked, "eager").known, "each policy has its own entries, and keeps them"
    assert tuned(catalog, asked, "graph").medians == graph.medians

    found = [(w.policy.measured_as, w.winner, w.runner_up) for w in winners(_rows(catalog), None)]
    assert found == [("eager", "steady", "catalog"), ("graph", "catalog", "steady")]

    assert catalog.select(asked).instead is None, "nobody allowed it"
    set_up(monkeypatch, allow_foreign=True)
    assert catalog.select(asked).instead is None, "in a graph ours is faster"
    set_up(monkeypatch, measured_as="eager")
    choice, instead = catalog.choice(asked), catalog.select(asked).instead
    assert choice.policy == Policy("eager")
    assert "Steady 1.2 (steady) took" in choice.about
    assert instead is not None
    assert instead.implementation is steady.STEADY
    near = catalog.select(problem(seqlen_q=5)).instead
    assert near is not None
    assert near.rival == instead.rival, "the nearest measured problem decides"

    q, k, v = (torch.randn(1, 1, 4, 32) for _ in range(3))
    monkeypatch.setattr(Catalog, "default", lambda: catalog)
    started = time.thread_time_ns()
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert time.thread_time_ns() - started >= SLOW_US * 1000, "the function for PyTorch calls it"
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(o, wanted)
    steady.STEADY.__class__.wrong = True  # whatever it computes now is not what the next calls want
    for more in ({"attn_mask": torch.ones(4, 4, dtype=torch.bool).tril()}, {"is_causal": True}):
        learnt = q.clone().requires_grad_("is_causal" in more)
        torch.testing.assert_close(scaled_dot_product_attention(learnt, k, v, **more).detach(), wanted)

    monkeypatch.setattr(type(steady.STEADY), "version", "1.3")
    catalog.forget()
    assert catalog.select(asked).instead is None, "another version was timed"


def _rows(catalog: Catalog) -> Callable[[str, Mapping[str, Any]], list[tuple[Any, ...]]]:
    return lambda sql, parameters: [tuple(row) for row in catalog.connection.execute(sql, parameters)]


def test_an_implementation_that_is_wrong_or_raises_is_not_timed(
    steady: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, host, expected = steady.STEADY, HostDevice(1), expected_of(problem(), "host")
    check(one, expected, host)
    monkeypatch.setattr(type(one), "wrong", True)
    with pytest.raises(DeviceError, match="steady is WRONG: o is off by"):
        check(one, expected, host)
    monkeypatch.setattr(type(one), "wrong", property(lambda _: 1 / 0))
    for failing in (
        lambda: check(one, expected, host),
        lambda: entrant(one, expected.problem, expected.inputs, host, Policy("eager")),
    ):
        with pytest.raises(DeviceError, match="steady failed: ZeroDivisionError: division by zero"):
            failing()
    with pytest.raises(DeviceError, match="cannot be checked: no sink, no sliding window"):
        check(one, expected_of(problem(mask="window", window=(2, 0), sink_size=1), "host"), host)


def test_names_that_are_unknown_or_not_installed_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KNOWN["flash_attn"].__class__, "missing", "flash_attn")
    for name, message in (("sdpb", "did you mean sdpa"), ("flash_attn", "the module flash_attn is missing")):
        with pytest.raises(UsageError, match=message) as error:
            lookup.chosen("attention", ["sdpa", name])
        assert "Installed for attention: sdpa" in str(error.value.hint)


def timing(median_ms: float, measured_as: Any, asked: Problem, catalog: Catalog) -> ForeignTiming:
    measurement = Measurement(9, *[median_ms] * 6, measured_as=measured_as)
    rival = foreign.Rival("sdpa", "PyTorch 9", "9", median_ms)
    return foreign.rival_timing(rival, asked, catalog.device_info("host"), measurement)


@pytest.mark.slow
def test_timings_of_rivals_are_merged_queried_and_ranked(catalog: Catalog, tmp_path: Path, host_file: Path) -> None:
    """A merge adds those of other machines; explain puts them in their place under the policy in force."""
    asked, measured = problem(), {"graph": 9.0, "eager": 1.0}
    other = Path(shutil.copy(host_file, tmp_path / "other.db"))
    first = catalog.candidates(asked, limit=1)[0].kernel
    with catalog.writing() as connection:
        foreign.record(connection, [timing(ms, policy, asked, catalog) for policy, ms in measured.items()])
        connection.execute(
            "INSERT INTO artifact (key, kernel_id, arch, toolchain, flags, status, log, compile_s, created) "
            "VALUES (?1, ?1, ?2, '', '', 'built', '', 0, '2026-01-01T00:00:00+00:00')",
            (first.id, first.arch),
        )
        for policy in ("graph", "eager"):
            connection.execute(
                "INSERT INTO timing (problem_id, kernel_id, device_id, artifact_key, measured_as, cold, n, min_ms, "
                "median_ms, p10_ms, p90_ms, low_ms, high_ms, tflops, gbps, created) SELECT problem.id, ?1, device.id, "
                "?1, ?2, 0, 9, 2, 2, 2, 2, 2, 2, 1, 1, '2026-01-01T00:00:00+00:00' FROM problem, device",
                (first.id, policy),
            )
    catalog.close()
    with Catalog(other) as merged:
        for _ in range(2):
            merged.merge([catalog.path])
    shown = ("query", "--foreign", "problem_key IS NOT NULL", "--columns", "name,measured_as,median_ms")
    listed = json.loads(command.catalog(*shown, "--format", "json", db=other).stdout)
    assert {row["measured_as"]: row["median_ms"] for row in listed} == measured
    words = "--batch 1 --nhead-q 1 --seqlen-q 4 --hdim-q 32 --dtype fp32 --mask causal --lse --limit 2 --format json"
    for policy, rank in (("graph", 2), ("eager", 1)):
        done = command.catalog(
            "explain", *words.split(), db=catalog.path, CATALOG_MEASURED_AS=policy, CATALOG_NUM_THREADS=1
        )
        ranks = {row["id"]: row["rank"] for row in json.loads(done.stdout) if row["kind"] == "kernel"}
        assert ranks["foreign:sdpa"] == rank, done.stderr
    answered = command.catalog(
        *("select", *words.split(), "--allow", "foreign"),
        db=catalog.path,
        CATALOG_MEASURED_AS="eager",
        CATALOG_NUM_THREADS=1,
    )
    assert answered.returncode == 0, "the version that was timed is not installed here"
    assert "foreign:sdpa" not in answered.stdout
    printed = command.catalog("report", "--winners", "--format", "json", db=catalog.path)
    assert {(row["as"], row["winner"], row["phase"]) for row in json.loads(printed.stdout)} == {
        ("eager", "sdpa", "prefill"),
        ("graph", "catalog", "prefill"),
    }


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("mask", ["no", "top_left"])
@pytest.mark.parametrize("name", KNOWN)
def test_each_is_called_as_its_project_documents(
    name: str, mask: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stand-ins with the surface of each package; grouped heads, and causal masks of both corners on a square."""
    one = KNOWN[name]
    for module, content in _surfaces().items():
        if module.partition(".")[0] in one.modules:
            monkeypatch.setitem(sys.modules, module, content)
    monkeypatch.setattr(type(one), "dtypes", (*one.dtypes, "fp32"))
    asked = problem(nhead_q=2, nhead_k=1, seqlen_q=6, hdim_q=8, mask=mask, layout=layout, lse=False)
    place = next(iter(one.places))
    assert not one.objection(asked, place)
    tensors = {name: torch.randn(*asked.shapes[name]) for name in ("q", "k", "v")}
    o = one.bind(asked, tensors)()["o"]
    inputs = {name: tensor.numpy() for name, tensor in tensors.items()}
    wanted = operation().reference(asked, inputs)["o"]
    assert o.shape == tuple(asked.shapes["o"])
    torch.testing.assert_close(o.double(), torch.from_numpy(wanted), rtol=1e-4, atol=1e-4)


def _surfaces() -> dict[str, Any]:
    """Packages that compute on the CPU; each asserts what its function requires."""

    def plain(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return o.transpose(1, 2)

    def flash(q: Any, k: Any, v: Any, *, softmax_scale: float | None, causal: bool = False, **features: Any) -> Any:
        assert features.keys() <= {"window_size", "softcap", "alibi_slopes"}
        assert not any(features.values())
        return plain(q, k, v, causal, softmax_scale)

    def flash3(*tensors: Any, **more: Any) -> Any:
        assert "alibi_slopes" not in more
        return flash(*tensors, **more), "lse"

    class Lower: ...

    class FromBottomRight: ...

    def memory_efficient_attention(query: Any, key: Any, value: Any, *, attn_bias: Any, scale: float | None) -> Any:
        assert query.ndim == key.ndim == 5, "grouped heads have an axis of their own"
        assert query.shape[2:4] == key.shape[2:4]
        flat = (tensor.flatten(2, 3) for tensor in (query, key, value))
        return plain(*flat, attn_bias is not None, scale).unflatten(2, query.shape[2:4])

    def single_prefill_with_kv_cache(
        q: Any, k: Any, v: Any, *, causal: bool, sm_scale: float | None, logits_soft_cap: float | None
    ) -> Any:
        assert q.ndim == 3, "one sequence, tokens before heads"
        return plain(q[None], k[None], v[None], causal, sm_scale)[0]

    ops = SimpleNamespace(memory_efficient_attention=memory_efficient_attention, LowerTriangularMask=Lower)
    return {
        "flash_attn": SimpleNamespace(flash_attn_func=flash),
        "torch.nn.attention": SimpleNamespace(
            SDPBackend=SimpleNamespace(CUDNN_ATTENTION="cudnn"), sdpa_kernel={"cudnn": nullcontext()}.__getitem__
        ),
        "flash_attn_interface": SimpleNamespace(flash_attn_func=flash3),
        "aiter": SimpleNamespace(flash_attn_func=flash),
        "xformers": SimpleNamespace(),
        "xformers.ops": ops,
        "xformers.ops.fmha": SimpleNamespace(),
        "xformers.ops.fmha.attn_bias": SimpleNamespace(LowerTriangularFromBottomRightMask=FromBottomRight),
        "flashinfer": SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache),
    }
