"""Run sanitized host kernels on tensors without a spare byte: the process that the sanitizers are preloaded into.

``sanitize_host.py FILE``: FILE is a JSON list of cases. A case may have a flaw: the name of a tensor that is one
element too short, or "misaligned". A sanitizer's report ends the process; a wrong result is told on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from catalog.runtime.devices.host import HostDevice
from catalog.runtime.reference import attention_fwd, tolerance
from catalog.runtime.tensors import Array, make_inputs, make_outputs
from catalog.schema.problem import Problem


def one_short(tensor: Array) -> Array:
    """The same shape, but the memory ends before the last element."""
    return as_strided(tensor.ravel()[:-1].copy(), tensor.shape, tensor.strides)


def misaligned(tensor: Array) -> Array:
    return np.zeros(tensor.nbytes + 1, np.uint8)[1:].view(tensor.dtype).reshape(tensor.shape)


def run(device: HostDevice, case: dict[str, Any]) -> bool:
    """Whether the result is within tolerance."""
    problem = Problem(**json.loads(case["problem"]))
    inputs, outputs = make_inputs(problem, case["seed"]), make_outputs(problem)
    tensors = inputs | outputs
    if case["flaw"] == "misaligned":
        tensors["lse"] = misaligned(tensors["lse"])
    elif case["flaw"]:
        tensors[case["flaw"]] = one_short(tensors[case["flaw"]])
    call = device.call(problem, tensors)
    for name, tensor in tensors.items():
        if not tensor.size:
            getattr(call.args, name).data = None
    device.launch(device.load(Path(case["path"]), case["sha256"], case["kernel_id"]), call)
    o, lse = attention_fwd(problem, **inputs)
    return tolerance(problem.dtype, "o").allows(outputs["o"], o) and (
        not problem.lse or tolerance(problem.dtype, "lse").allows(outputs["lse"], lse)
    )


def main() -> int:
    device = HostDevice(num_threads=2)
    cases = json.loads(Path(sys.argv[1]).read_text())
    wrong = [case["problem"] for case in cases if not run(device, case)]
    print("\n".join(wrong), file=sys.stderr)
    print(len(cases) - len(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
