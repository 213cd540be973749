"""Export a convolution's kernel as a C library, and call it from C: neither Python nor the catalog is needed then."""

import subprocess
import sys
import tempfile
from pathlib import Path

from catalog import Catalog
from catalog.ops.conv.problem import ConvProblem

PROGRAM = """
#include <stdio.h>
#include "convs_register.h"

int main(void) {
    /* one image of 3 x 3 with one channel, and a filter of 2 x 2 that adds a diagonal */
    float image[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, filter[4] = {1, 0, 0, 1}, sums[4];
    /* for depth, height and width: extents of input, output and filter, strides, dilations, padding */
    int32_t geometry[18] = {1, 3, 3, 1, 2, 2, 1, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0};
    catalog_args args = {sizeof args, CATALOG_ABI_VERSION};
    args.input = (catalog_tensor){image, 9};
    args.weight = (catalog_tensor){filter, 4};
    args.output = (catalog_tensor){sums, 4};
    args.geometry = geometry;
    args.n = args.c = args.k = args.g = 1;
    int32_t status = convs_kernels(NULL)->launch(&args, NULL);
    printf("%g %g %g %g\\n", sums[0], sums[1], sums[2], sums[3]);
    return status;
}
"""

kernel = Catalog.select(ConvProblem(n=1, c=64, k=64, size=(28, 28), filter=(2, 2), dtype="fp32")).kernels[0]

with tempfile.TemporaryDirectory() as folder:
    out, main = Path(folder) / "convs", Path(folder) / "main"
    what = ("--operation", "conv", "--where", f"id='{kernel.id}'", "--format", "make", "--prefix", "convs")
    library = (f"-I{out}", f"-I{out}/include", f"-L{out}", "-lconvs", f"-Wl,-rpath,{out}")
    commands = [
        (sys.executable, "-m", "catalog", "export", *what, "--out", str(out)),
        ("make", "-s", "-C", str(out)),
        ("cc", f"{main}.c", *library, "-o", str(main)),
    ]
    main.with_suffix(".c").write_text(PROGRAM)
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603
    printed = subprocess.run([main], check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603

print(f"{kernel.name}, called from C: {printed}")
assert printed == "6 8 12 14"
