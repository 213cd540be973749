"""Run sanitized host kernels on tensors without a spare byte: the process that the sanitizers are preloaded into.

``sanitize_host.py FILE``: FILE is a JSON list of cases. A case may have a flaw: the name of a tensor that is one
element too short, or "misaligned". A sanitizer's report ends the process; a wrong result is reported on stderr.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from host_problems import draw_inputs
from numpy.lib.stride_tricks import as_strided

from catalog.ops import operation_of, problem_of_key
from catalog.ops.attention.problem import Problem
from catalog.runtime.devices.host.device import HostDevice
from catalog.runtime.inputs import make_inputs
from catalog.runtime.splits import agreed_workspace
from catalog.runtime.tensors import Array, make_outputs, results
from catalog.schema.arithmetic import Arithmetic


def one_short(tensor: Array) -> Array:
    """The same shape, but the memory ends before the last element."""
    return as_strided(tensor.ravel()[:-1].copy(), tensor.shape, tensor.strides)


def misaligned(tensor: Array) -> Array:
    return np.zeros(tensor.nbytes + 1, np.uint8)[1:].view(tensor.dtype).reshape(tensor.shape)


def run(device: HostDevice, case: dict[str, Any]) -> bool:
    """Whether the results are within tolerance."""
    problem = problem_of_key(case["problem"])
    draw = draw_inputs if isinstance(problem, Problem) else make_inputs
    inputs = draw(problem, case["seed"])
    updated = {name: array.copy() for name, array in inputs.items() if problem.tensors[name].role == "updated"}
    tensors = inputs | updated | make_outputs(problem, inputs)
    if case["flaw"] == "misaligned":
        tensors["lse"] = misaligned(tensors["lse"])
    elif case["flaw"]:
        tensors[case["flaw"]] = one_short(tensors[case["flaw"]])
    kernels = [device.load(Path(found["path"]), found["sha256"], found["kernel_id"]) for found in case["libraries"]]
    call = device.call(problem, tensors, agreed_workspace(problem, kernels, case["num_splits"]))
    for name, tensor in tensors.items():
        if not tensor.size:
            getattr(call.args, problem.tensors[name].slot).data = None
    for kernel in kernels:
        device.launch(kernel, call)
    of = operation_of(problem)
    expected, allowed = (
        of.reference(problem, inputs),
        of.tolerances(problem, inputs, Arithmetic(**case["arithmetic"])),
    )
    written = results(problem.form, tensors)
    return all(allowed[name].allows(array, expected[name]) for name, array in written.items())


def main() -> int:
    device = HostDevice(num_threads=2)
    cases = json.loads(Path(sys.argv[1]).read_text())
    wrong = [case["problem"] for case in cases if not run(device, case)]
    print("\n".join(wrong), file=sys.stderr)
    print(len(cases) - len(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
