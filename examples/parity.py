"""Parity: the catalog's kernel names compared one by one with those that upstream's own generator lists."""

from catalog import Catalog

catalog = Catalog()
print("arch     receipt            kernels  families  missing  extra")
for arch, receipt, name in (("gfx950", 0, "CK's default"), ("gfx950", 2, "flash"), ("gfx942", 0, "CK's default")):
    comparison = catalog.parity(arch, receipt)
    missing, extra = (sum(map(len, names.values())) for names in (comparison.missing, comparison.extra))
    print(
        f"{arch:<8} {receipt:>3}, {name:<12} {len(comparison.reference):>8,} {len(comparison.families):>9}"
        f" {missing:>8} {extra:>6}"
    )
    assert comparison.passed, comparison.report()
    assert comparison.reference, "there are names to compare with"

print(f"\nof the last, by family: {comparison.report()}")
for family, names in sorted(comparison.families.items()):
    print(f"  {family:<20} {names:>7,}")
