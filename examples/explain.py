"""Why is there no such kernel, and why was this one chosen? Every rule answers with its reason and its source."""

from catalog import Catalog, Problem

catalog = Catalog()

stated = {
    "family": "fwd",
    "dtype": "bf16",
    "hdim_q": 128,
    "hdim_v": 128,
    "pipeline": "qr_async",
    "mode": "group",
    "pad_s": 0,
}
explained = catalog.explain(stated, arch="gfx950", limit=3)
print(f"{' '.join(f'{name}={value}' for name, value in stated.items())}\n{explained.summary}")
for finding in explained.rejections:
    print(f"  {finding.id}: {finding.reason}\n    source: {finding.source}")
print("the nearest that exist:")
for match in explained.matches:
    print(f"  {' '.join(match.changes):<28} {match.kernels:>5} kernels")
assert explained.kernels == 0
assert "group_mode_padding" in {finding.id for finding in explained.rejections}

problem = Problem(batch=1, nhead_q=8, seqlen_q=2000, hdim_q=120, dtype="bf16", mask="causal")
steps, kept = catalog.narrowing(problem, arch="gfx950", limit=3)
print(f"\n{problem.key}")
print("step                              rejects     left")
for step in steps:
    if step.rejects:
        print(f"{step.kind:<14} {step.id:<18} {step.rejects:>7,} {step.left:>8,}")
print("the best of those that are left:")
for candidate in kept:
    print(f"  {candidate.kernel.name}")
assert kept[0].kernel == catalog.select(problem, arch="gfx950").kernels[0]
