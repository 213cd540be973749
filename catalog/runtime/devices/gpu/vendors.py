"""Differences between GPU vendors apart from runtime calls: names, and numbers defined by DLPack."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vendor:
    """A vendor of GPUs.

    ``company`` and ``runtime`` are names for messages; ``hidden_by`` names the environment variables that hide GPUs.
    ``memory`` is DLPack's type of the GPUs' memory, ``default_stream`` its number for the stream with handle 0.
    """

    company: str
    runtime: str
    hidden_by: str
    memory: int
    default_stream: int


AMD = Vendor("AMD", "HIP", "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES", memory=10, default_stream=0)
NVIDIA = Vendor("NVIDIA", "CUDA", "CUDA_VISIBLE_DEVICES", memory=2, default_stream=1)
