"""The operation attention, as the rest of the catalog sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from catalog.errors import BuildError
from catalog.ops.attention.arguments import ARGUMENTS
from catalog.ops.attention.dispatcher_names import DISPATCHER_NAME
from catalog.ops.attention.kernel import AttentionKernel
from catalog.ops.attention.likeness import circumstances_of
from catalog.ops.attention.names import parse_tile
from catalog.ops.attention.problem import Problem
from catalog.ops.attention.shape_names import SHORT_TRAITS, lengths_of, short_name
from catalog.ops.attention.shrinks import SHRINKS
from catalog.ops.attention.stages import (
    MAIN_STAGE,
    REQUIRED_TRAITS,
    STAGES,
    required_traits,
    stages_of,
)
from catalog.ops.attention.tensors import zeroed_outputs
from catalog.ops.attention.traits import Dtype, Family, Pipeline
from catalog.ops.attention.workspace import most_splits, partial_bytes, splits_of, workspace_of
from catalog.ops.implementation import Implementation
from catalog.ops.protocol import Operation
from catalog.schema.arithmetic import FLOAT32, Arithmetic
from catalog.schema.deployment import Deployment
from catalog.schema.kernel import Kernel
from catalog.schema.lineage import OWN_SPACES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from catalog.build.generators import Generator
    from catalog.runtime.tolerance import Tolerance
    from catalog.schema.lineage import Lineage
    from catalog.schema.problem_form import Form
from catalog.schema.columns import Column


class Attention(Operation):
    """Scaled dot-product attention, its gradients, and the caches of keys and values."""

    name = "attention"
    about = "scaled dot-product attention"
    kernel = AttentionKernel
    main_space = "ck"
    variant = Column(
        "mask_impl", "TEXT", "generic, simplified", "", "upstream's mask classes: no/causal/generic, or no/mask"
    )
    columns = DISPATCHER_NAME
    index = ("family", "dtype", "mode", "mask", "hdim_q", "hdim_v")
    parameters = (
        *("batch", "nhead_q", "nhead_k", "seqlen_q", "seqlen_k", "hdim_q", "hdim_v"),
        *("tokens_k", "page_size", "num_pages", "num_splits", "seqlen_new", "rotary_dim"),
        *("block_mask_q", "block_mask_kv", "block_scale_size_kv"),
        *("dropout", "dlse"),
    )
    variants = "masks"
    variant_trait = "mask"
    axes = MappingProxyType({"hdim": ("hdim_q", "hdim_v"), "warp": ("warp_m0", "warp_n0", "warp_k0")})
    # The names and words of CK's dispatcher: dispatcher/codegen/fmha/instance_gen.py, expand_sweep. Sweep files name a
    # mask by its corner, but the same kernel is compiled for causal masks of both corners.
    sweep_names = MappingProxyType(
        {name: name for name in ("pipeline", "mask", "bias", "mode", "lse", "dropout", "logits", "sink", "paged_kv")}
        | {"data_type": "dtype", "block_per_cu": "block_per_cu"}
    )
    filter_names = MappingProxyType({"data_type": "dtype", "use_trload": "trload"})
    sweep_words = MappingProxyType({"mask": {"no": "no", "top_left": "causal", "generic": "generic"}})
    chunk = ("dtype", "hdim_q", "hdim_v")
    listed = ("arch", "family", "dtype", "hdim_q", "hdim_v", "mask", "built", "name")

    def read_tile(self, text: str) -> dict[str, Any]:
        """As :func:`~catalog.ops.attention.names.parse_tile`."""
        return parse_tile(text)

    def generator(self, root: Path, timeout: float) -> Generator:
        """As :func:`catalog.ops.attention.upstream.live.find_generator`."""
        from catalog.ops.attention.upstream.live import find_generator

        return find_generator(root, timeout)

    def checkout_revision(self) -> str:
        """The revision of the checkout's generator, which writes the sources of its own rows only."""
        from catalog.ops.attention.upstream.sources import find_checkout

        return find_checkout().generator.revision

    def fallback(self) -> tuple[str, str]:
        """A forward kernel of the checkout's revision."""
        from catalog.ops.attention.upstream.sources import ck_facts

        return self.checkout_revision(), ck_facts().fallback

    problem = Problem
    arguments = ARGUMENTS
    headers = MappingProxyType({"kernels": Path(__file__).parent / "kernels"})
    smoke_traits = ("hdim_q", "hdim_v", "dtype")
    # The columns of CK's own benchmark.
    bench_fields = ("batch", "seqlen_q", "seqlen_k", "nhead_q", "nhead_k", "hdim_q", "hdim_v", "dtype")
    bench_traits = ("family", "mode", "pipeline")
    tile_axes = ("tile_m0", "tile_n0")
    main_families = tuple(MAIN_STAGE.values())
    kernels_check_values = True
    required = REQUIRED_TRAITS
    shrinks = SHRINKS

    def main_stage(self, problem: Problem) -> Family:
        """As :data:`~catalog.ops.attention.stages.MAIN_STAGE`."""
        return MAIN_STAGE[problem.op]

    def stages(self, problem: Problem, main: Kernel | None = None) -> tuple[Family, ...]:
        """As :func:`~catalog.ops.attention.stages.stages_of`."""
        return STAGES[problem.op] if main is None else stages_of(problem.op, main)

    def required_traits(self, problem: Problem, family: str, lineage: Lineage) -> dict[str, Any]:
        """As :func:`~catalog.ops.attention.stages.required_traits`."""
        return required_traits(problem, family, lineage)

    # Without functions in between: each is called for every new problem.
    splits = staticmethod(splits_of)
    most_splits = staticmethod(most_splits)
    partial_bytes = staticmethod(partial_bytes)
    workspace = staticmethod(workspace_of)

    def work(self, problem: Problem, kernel: AttentionKernel, units: int) -> Mapping[str, float]:
        """As :func:`catalog.ops.attention.work.work_of`."""
        from catalog.ops.attention.work import work_of

        return work_of(problem, kernel, units)

    def stated_splits(self, problem: Problem) -> int:
        """Its ``num_splits``."""
        return problem.num_splits

    def draw(self, problem: Problem, name: str, rng: np.random.Generator) -> NDArray[Any]:
        """As :func:`catalog.ops.attention.inputs.draw`."""
        from catalog.ops.attention.inputs import draw

        return draw(problem, name, rng)

    def complete(self, problem: Problem, inputs: Mapping[str, NDArray[Any]]) -> Mapping[str, NDArray[Any]]:
        """As :func:`catalog.ops.attention.inputs.complete`."""
        from catalog.ops.attention.inputs import complete

        return complete(problem, inputs)

    def check_values(self, problem: Problem, tensors: Mapping[str, NDArray[Any]]) -> None:
        """As :func:`catalog.ops.attention.index_tensors.check_indices`."""
        from catalog.ops.attention.index_tensors import check_indices

        check_indices(problem, tensors)

    def zeroed_outputs(self, form: Form, inputs: Collection[str]) -> frozenset[str]:
        """As :func:`catalog.ops.attention.tensors.zeroed_outputs`."""
        return zeroed_outputs(form, inputs)

    def pools(self, problem: Problem) -> Mapping[str, str]:
        """The pages of K and V."""
        if not problem.paged:
            return {}
        return dict.fromkeys(("k_cache", "v_cache"), f"num_pages={problem.num_pages}, page_size={problem.page_size}")

    def reference(self, problem: Problem, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """As :func:`catalog.ops.attention.reference.answers.reference`."""
        from catalog.ops.attention.reference.answers import reference

        return reference(problem, inputs)

    def tolerances(
        self, problem: Problem, inputs: Mapping[str, NDArray[Any]], arithmetic: Arithmetic = FLOAT32
    ) -> dict[str, Tolerance]:
        """As :func:`catalog.ops.attention.tolerance.tolerances`."""
        from catalog.ops.attention.tolerance import tolerances

        weights = problem.tensors["q"].element if arithmetic.rounds_factors else "float32"
        return tolerances(problem, inputs, weights, arithmetic.fp8_sum_bits, splits=arithmetic.splits_factors)

    def arithmetic(self, kernel: Kernel) -> Arithmetic:
        """Kernels that multiply pairs of bf16 or fp16 round the weights; tensor cores multiply float32 in parts."""
        pipeline = kernel.algorithm.pipeline
        return Arithmetic(
            rounds_factors=pipeline in (Pipeline.HOST_BF16, Pipeline.HOST_AMX),
            splits_factors=kernel.signature.dtype is Dtype.FP32
            and pipeline in (Pipeline.SM90_MMA, Pipeline.SM90_WHOLE),
        )

    def problems_of_model(self, config: Mapping[str, Any], deployment: Deployment) -> Iterable[Problem]:
        """As :func:`catalog.ops.attention.models.problems_of_model`."""
        from catalog.ops.attention.models import problems_of_model

        return problems_of_model(config, deployment)

    def label(self, problem: Problem) -> str:
        """Its ``op`` and element type."""
        return f"{problem.op} {problem.dtype}"

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        """As :data:`catalog.ops.attention.implementations.IMPLEMENTATIONS`."""
        from catalog.ops.attention.implementations import IMPLEMENTATIONS

        return IMPLEMENTATIONS

    def circumstances(self, problem: Problem) -> Mapping[str, Any]:
        """As :func:`catalog.ops.attention.likeness.circumstances_of`."""
        return circumstances_of(problem)

    short_traits = SHORT_TRAITS

    def short_name(self, traits: Mapping[str, Any]) -> str:
        """As :func:`catalog.ops.attention.shape_names.short_name`."""
        return short_name(traits)

    def lengths(self, problem: Problem) -> Iterator[tuple[str, int]]:
        """As :func:`catalog.ops.attention.shape_names.lengths_of`."""
        return lengths_of(problem)

    def emit(self, kernel: Kernel, backend: str, memory: Path) -> str:
        """The output of the backend's emitter; for AMD, rows that upstream's generator lists contain its source."""
        if backend == "hip":
            from catalog.ops.attention.kernels.ck.emit import emit_generated, emit_row
            from catalog.ops.attention.upstream.sources import find_checkout

            checkout = find_checkout()
            if kernel.space in OWN_SPACES:
                return emit_generated(kernel, checkout.source(kernel, memory))
            return emit_row(kernel, checkout.headers)
        if backend == "cuda":
            from catalog.ops.attention.kernels.cuda.emit import emit as of_cuda

            return of_cuda(kernel)
        from catalog.ops.attention.kernels.host.emit import emit as of_host

        return of_host(kernel)

    def other_headers(self, backend: str) -> Mapping[str, Path]:
        """The headers of the CK checkout, for AMD."""
        if backend != "hip":
            return {}
        from catalog.ops.attention.upstream.sources import find_checkout

        checkout = find_checkout()
        return {"fmha": checkout.example, "ck": checkout.include}

    def headers_revisions(self, kernel: Kernel) -> tuple[str, ...]:
        """For a row of a sweep the checkout's, none if it is unknown; every known one if there is no checkout."""
        if kernel.space in OWN_SPACES:
            return super().headers_revisions(kernel)
        from catalog.ops.attention.kernels.ck.headers import all_headers
        from catalog.ops.attention.upstream.sources import find_checkout

        try:
            checkout = find_checkout()
        except BuildError:
            return tuple(all_headers())
        try:
            return (checkout.headers,)
        except BuildError:
            return ()  # emitting says that they are unknown

    def flags(self, kernel: Kernel, backend: str) -> tuple[str, ...]:
        """The flags with which upstream compiles the family."""
        if backend != "hip":
            return ()
        from catalog.ops.attention.upstream.sources import family_flags

        return family_flags(kernel.family)

    def smoke_fields(self, family: str, traits: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """As :func:`catalog.ops.attention.smoke.smoke_fields`."""
        from catalog.ops.attention.smoke import smoke_fields

        return smoke_fields(family, traits)


OPERATION = Attention()
