"""How kernels round on the way to their results: what a tolerance depends on besides the problem and its inputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The precision of intermediate results; without fields, everything is computed in float32.

    Attributes:
        rounds_factors: whether results that are multiplied again, such as attention's weights, are first rounded to the
            type of the inputs.
        fp8_sum_bits: the significant bits that matrix units keep of a sum of fp8 or bf8 products; None for all of
            float32.
        transforms_factors: whether factors are sums of several elements of the inputs, as in minimal filtering.
        splits_factors: whether matrix units multiply factors in float32 as sums of two of TF32, and leave out the
            product of two rests.
    """

    rounds_factors: bool = False
    fp8_sum_bits: int | None = None
    transforms_factors: bool = False
    splits_factors: bool = False

    def __or__(self, other: Arithmetic) -> Arithmetic:
        """The lower precision of both."""
        bits = [one.fp8_sum_bits for one in (self, other) if one.fp8_sum_bits is not None]
        return Arithmetic(
            self.rounds_factors or other.rounds_factors,
            min(bits, default=None),
            self.transforms_factors or other.transforms_factors,
            self.splits_factors or other.splits_factors,
        )


FLOAT32 = Arithmetic()
