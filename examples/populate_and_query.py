"""Make every kernel of an arch a row, and query the rows with SQL expressions over their traits."""

from collections import Counter

from catalog import Catalog, CatalogError

catalog = Catalog()
populated = catalog.populate("gfx950")  # a no-op if the rows exist
print(f"{populated.kernels:,} kernels of gfx950, {'there already' if populated.unchanged else 'now in the catalog'}")
for family, count in populated.families.items():
    print(f"  {family:<20} {count:>6,}")

where = "space = 'ck' AND mask_impl = 'generic' AND family = 'fwd_pagedkv'"  # a catalog may hold several of each
assert len(catalog.kernels(where, arch="gfx950")) == populated.families["fwd_pagedkv"]

where = "family = 'fwd' AND hdim_q = 128 AND dtype = 'bf16' AND mask = 'causal' AND mode = 'batch'"
kernels = catalog.kernels(where, arch="gfx950")
print(f"\n{len(kernels)} kernels: {where}")
for pipeline, count in Counter(str(kernel.algorithm.pipeline) for kernel in kernels).most_common():
    print(f"  {pipeline:<20} {count:>6}")

narrower = "tile_m0 = 128 AND lse AND NOT dropout AND id IN (SELECT kernel_id FROM kernel_receipt WHERE receipt = 2)"
print(f"\nof these: {narrower}")
for kernel in catalog.kernels(f"{where} AND {narrower}", arch="gfx950"):
    print(f"  {kernel.id[:12]}  {kernel.name}")

print("\nand with a mistake:")
try:
    catalog.kernels("hdim = 128", arch="gfx950")
except CatalogError as error:
    print(f"  {error}".replace("\n", "\n  "))
else:
    raise AssertionError("there is no column hdim")

assert kernels, "gfx950 has such kernels"
assert all(
    (k.signature.hdim_q, str(k.signature.dtype), str(k.signature.mask)) == (128, "bf16", "causal") for k in kernels
)
