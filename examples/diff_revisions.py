"""What a CK upgrade changes: the kernels that were added, removed or changed between two upstream revisions."""

from catalog import Catalog
from catalog.ops.attention.traits import Signature

catalog = Catalog()
found = catalog.diff("gfx942", "2025-07", "2026-05", receipt=2)  # 2: flash-attn's
print("family                appeared  vanished  changed     same")
for family in found.families:
    counts = len(family.appeared), len(family.vanished), len(family.changed), family.same
    print(f"{family.family!s:<20} {counts[0]:>9,} {counts[1]:>9,} {counts[2]:>8,} {counts[3]:>8,}")

print("\nwhat the later one can do, and the earlier one could not")
for family in found.families:
    for trait, values in family.new_values.items():
        if trait in Signature.model_fields:  # the other traits describe how a kernel computes it
            print(f"  {family.family!s:<20} {trait:<16} {', '.join(map(str, values))}")

# The later revision has the kernels that are the same, changed or appeared.
assert not found.empty
for family in found.families:
    there = catalog.kernels(
        f"family = '{family.family}' AND revision = '2026-05' AND space = 'ck' AND mask_impl = 'generic' "
        "AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = 2)",
        arch="gfx942",
    )
    assert len(there) == family.same + len(family.changed) + len(family.appeared)
