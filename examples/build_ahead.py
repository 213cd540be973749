"""Compile ahead of time, in parallel: the kernels for all problems of a service, before its first request."""

import time

from catalog import Catalog, Problem

SHAPE = {"batch": 1, "nhead_q": 8, "nhead_k": 2, "hdim_q": 64, "dtype": "fp32"}
problems = [
    Problem(seqlen_q=512, mask="causal", **SHAPE),
    Problem(seqlen_q=100, mask="causal", **SHAPE),  # another length, the same kernel
    Problem(seqlen_q=512, lse=True, **SHAPE),
    Problem(op="splitkv", seqlen_q=1, seqlen_k=4096, **SHAPE),
]

catalog = Catalog()
kernels = {kernel.id: kernel for problem in problems for kernel in catalog.select(problem).kernels}
started = time.perf_counter()
report = catalog.builder.build_many(kernels.values())
seconds = time.perf_counter() - started

print(f"{len(problems)} problems, {len(kernels)} kernels, {seconds:.2f} s")
print("compiled   seconds      KiB  kernel")
for artifact, kernel in zip(report.artifacts, kernels.values(), strict=True):
    when = "before" if artifact.cached else "now"
    size = artifact.path.stat().st_size // 1024
    print(f"{when:<8} {artifact.compile_seconds:>9.2f} {size:>8}  {kernel.name}")
assert not report.failures, [str(failure.error) for failure in report.failures]

print("\nfirst runs")
for problem in problems:
    result = catalog.select(problem).run()
    print(f"  {problem.op:<8} seqlen_q {problem.seqlen_q:<5} compiling took {result.compile_seconds:.0f} s")
    assert result.compile_seconds == 0, "everything was compiled before"
