"""Header rules compared with the compiler's front end, on drawn rows of every family, for one CK checkout.

python benchmarks/ck_headers.py --ck-root PATH --arch gfx942 --out drawn.csv

The front end instantiates a kernel's templates but generates no code. That takes a fraction of a compile and finds
static assertions, missing specialisations and too much LDS, but not what only the back end refuses. The same seed
draws the same rows. A run appends to the table and skips the rows that it has, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import resource
import sqlite3
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

from catalog.build.targets import CK
from catalog.errors import BuildError, CatalogError, UsageError
from catalog.ops.attention.kernels.ck.rows import source_of_row
from catalog.ops.attention.traits import Family
from catalog.ops.attention.upstream.sources import open_checkout
from catalog.rules.enumeration import Join
from catalog.rules.populate import Request, joins_of
from catalog.rules.restriction import Restriction
from catalog.runtime.catalog_file import read_spec
from catalog.schema.kernel import Kernel
from catalog.settings import choose

TILES = 300
"""Tiles of a join from which is drawn: a sweep has up to millions."""

ROWS = 8
"""Rows of each part of a sweep that break the same rules, from which is drawn."""

STRICTER = {
    "keys_fill_threads", "keys_fill_async_loads", "keys_fill_wide_async_loads",
    "keys_fill_transposing_loads", "waves_power_of_two", "dropout_of_wide_warp_tiles",
}  # fmt: skip
"""Rules that also refuse rows that compile: the kernel would leave out keys, share tiles unevenly or overrun LDS."""

INSTANCES = {Family.FWD_SPLITKV: "true, false", Family.FWD_SPLITKV_COMBINE: "3"}
"""Which of a row's kernels is compiled, as arguments of the template ``Instance``; other rows have a single kernel."""

# CK calls a kernel's static LDS GetSmemSize; kernels without any need not have the function. A kernel that is not
# available compiles to nothing.
CHECKS = """
#include "ck/launch.hpp"
template <class Kernel, class = void> constexpr int lds_of = 0;
template <class Kernel>
constexpr int lds_of<Kernel, std::void_t<decltype(Kernel::GetSmemSize())>> = Kernel::GetSmemSize();
template <class Kernel, class = void> constexpr bool is_empty = false;
template <class Kernel>
constexpr bool is_empty<Kernel, std::void_t<decltype(Kernel::kIsAvailable)>> = !Kernel::kIsAvailable;
static_assert(lds_of<KERNEL> <= MOST_LDS, "LDS exceeds that of a compute unit");
static_assert(!is_empty<KERNEL>, "the kernel does nothing");
void use(const ck_tile::stream_config& to, const Instance::Args& args) { USE; }
"""

COLUMNS = ("headers", "arch", "space", "family", "name", "rules", "verdict", "agrees", "seconds", "why")


class Drawn(NamedTuple):
    """A row, and the ids of the header rules that it breaks."""

    kernel: Kernel
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Draw:
    """Rows of one family, arch and space in random order."""

    arch: str
    space: str
    family: Family
    headers: str
    seed: int

    @cached_property
    def _rows(self) -> tuple[list[Drawn], dict[tuple[str, ...], list[Drawn]]]:
        """Rows that meet the rules, and the others by the rules that they break."""
        # Upstream's split kernels compile with simplified masks only; sweeps have the generic ones.
        revision, variant = (self.headers, "simplified") if self.space == "ck" else (None, "generic")
        spec = read_spec(self.arch, revision, self.space)
        numbers = random.Random(f"{self.seed} {self.arch} {self.space} {self.family}")  # noqa: S311
        accepted, refused = list[Drawn](), defaultdict[tuple[str, ...], list[Drawn]](list)
        with closing(sqlite3.connect(":memory:")) as connection:
            connection.row_factory = sqlite3.Row
            for join in joins_of(Request(spec, variant, restriction=Restriction(families=(self.family,)))):
                for drawn in self._some_of(connection, join, numbers):
                    (refused[drawn.rules] if drawn.rules else accepted).append(drawn)
        for some in (accepted, *refused.values()):
            numbers.shuffle(some)
        return accepted, refused

    def _some_of(self, connection: sqlite3.Connection, join: Join, numbers: random.Random) -> Iterator[Drawn]:
        """Some rows of each part of a join, for each set of broken rules."""
        most = ROWS if join.in_parts else TILES
        rules = [rule for rule in join.spec.demands if not rule.headers or self.headers in rule.headers]
        broken = " || ".join(f"iif({rule.expr}, '', '{rule.id} ')" for rule in rules) or "''"
        (made,) = join.enumeration.yields
        names = join.names_sql(made, *join.operation.traits.identity, *join.operation.traits)
        join.fill(connection)
        tiles = [row[0] for row in connection.execute("SELECT rowid FROM tile")]
        kept = numbers.sample(tiles, min(TILES, len(tiles)))
        connection.execute(f"DELETE FROM tile WHERE rowid NOT IN ({', '.join(map(str, kept))})")
        for chunk in join.chunks(connection):
            connection.execute("DROP TABLE IF EXISTS temp.combination")
            connection.execute(join.combine_sql(join.spec.receipt_numbers), chunk)
            connection.execute("DROP TABLE IF EXISTS temp.judged")
            connection.execute(f"CREATE TEMP TABLE judged AS SELECT *, {broken} AS broken FROM ({names})")
            for (ids,) in connection.execute("SELECT DISTINCT broken FROM judged").fetchall():
                found = connection.execute("SELECT rowid FROM judged WHERE broken = ?", [ids]).fetchall()
                for (row,) in numbers.sample(found, min(most, len(found))):
                    drawn = connection.execute("SELECT * FROM judged WHERE rowid = ?", [row]).fetchone()
                    yield Drawn(join.operation.kernel.from_row(drawn), tuple(ids.split()))

    def rows(self, first: int) -> Iterator[Drawn]:
        """One row that meets the rules, then two that do not, and so on, as long as there are some.

        ``first`` is where in these turns of three it begins. The refused rows break each rule alone in turn, then
        several; those that may compile come last.
        """
        accepted, refused = self._rows
        order = sorted(refused)
        random.Random(f"{self}").shuffle(order)  # noqa: S311
        order.sort(key=lambda ids: (STRICTER.issuperset(ids), len(ids)))
        turns = (refused[ids][turn] for turn in count() for ids in order if turn < len(refused[ids]))
        most = sum(map(len, refused.values()))
        meet, rest = iter(accepted), (row for _, row in zip(range(most), turns, strict=False))
        for kind in count(first):
            row = next(meet if kind % 3 == 0 else rest, None) or next(rest if kind % 3 == 0 else meet, None)
            if row is None:
                return
            yield row


class Verdict(NamedTuple):
    """What the front end says about a row; ``seconds`` of CPU time."""

    verdict: str
    why: str
    seconds: float


@dataclass(frozen=True)
class FrontEnd:
    """Clang's front end on the device side, for the headers of one revision.

    Headers that many rows share are compiled once for each arch and set of flags, into ``folder``.
    """

    headers: str
    folder: Path

    def judge(self, kernel: Kernel) -> Verdict:
        try:
            source = source_of_row(kernel, self.headers)
        except BuildError as error:
            return Verdict("no source", error.message.partition(": ")[2], 0.0)
        shared = next(line for line in source.splitlines() if "ck/rows/headers_" in line)
        most = 160 * 1024 if kernel.arch == "gfx950" else 64 * 1024
        kernel_type, use = "Instance::Kernel", "Instance::run(to, args)"
        if chosen := INSTANCES.get(Family(kernel.family)):
            kernel_type, use = f"Instance::Instance<{chosen}>::Kernel", f"Instance::enqueue<{chosen}>(to, args)"
        checks = CHECKS.replace("KERNEL", kernel_type).replace("MOST_LDS", str(most)).replace("USE", use)
        return self._run(kernel, shared, source + checks)

    def _run(self, kernel: Kernel, shared: str, source: str) -> Verdict:
        toolchain, unit = CK.toolchain_of(kernel), CK.unit(source, kernel)
        command = toolchain.compile_command(tuple(unit.include_dirs.values()))[:-4]  # without -c, source, -o, object
        command = [flag for flag in command if not flag.startswith("-Rpass")]
        command += ["--offload-device-only", "-fsyntax-only", "-Wfatal-errors"]
        compiled = self.folder / f"{kernel.arch}{'-'.join(CK.flags_of(kernel))}.pch"
        if not compiled.exists():
            common = compiled.with_suffix(".cpp")
            common.write_text(f'#include "hip/older_hip.hpp"\n{shared}\n')
            made = self._ask([*command, *_cc1("-emit-pch", "-o", str(compiled)), str(common)])
            if made.verdict != "compiles":
                raise BuildError(f"{shared}: {made.why}", hint="`catalog doctor` tests the compiler.")
        unit_file = self.folder / "row.cpp"
        unit_file.write_text(source)
        return self._ask([*command, *_cc1("-include-pch", str(compiled)), str(unit_file)])

    def _ask(self, command: Sequence[str]) -> Verdict:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)  # noqa: S603
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        errors = [line for line in done.stderr.splitlines() if "error:" in line] or [done.stderr[-200:]]
        why = re.sub(r"^\S*/(?=ck_tile/)", "", errors[0])
        return Verdict("compiles" if done.returncode == 0 else "refused", why if done.returncode else "", seconds)


def _cc1(*flags: str) -> list[str]:
    return [word for flag in flags for word in ("-Xclang", flag)]


def agrees(rules: Sequence[str], verdict: str) -> str:
    """Whether rules and front end agree: ``yes``, ``no``, or ``stricter`` if the rules refuse more on purpose."""
    if (verdict == "compiles") != bool(rules):
        return "yes"
    return "stricter" if rules and STRICTER.issuperset(rules) else "no"


def print_table(table: Path) -> None:
    """Print how many rows of each family compile, and how many the rules judge otherwise."""
    judged = defaultdict[tuple[str, str], Counter[str]](Counter)
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            judged[row["headers"], row["family"]].update(("drawn", row["verdict"], f"agrees: {row['agrees']}"))
    columns = ("drawn", "compiles", "refused", "no source", "agrees: yes", "agrees: stricter", "agrees: no")
    print("headers", "family", *columns, sep=" | ")
    for place, numbers in sorted(judged.items()):
        print(*place, *(numbers[column] for column in columns), sep=" | ")


def main() -> None:
    """Draw, compile, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ck-root", type=Path, required=True, help="the checkout whose headers compile the rows")
    parser.add_argument("--arch", action="append", help="default: gfx90a, gfx942, gfx950")
    parser.add_argument("--space", action="append", help="default: rules, exhaustive, ck")
    parser.add_argument("--family", action="append", type=Family, help="default: all nine")
    parser.add_argument("--rows", type=int, default=30, help="of a family, over the arches and spaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the table, a CSV file")
    options = parser.parse_args()
    choose(ck_root=options.ck_root)
    headers = open_checkout(options.ck_root).headers
    places = [*product(options.space or ("rules", "exhaustive", "ck"), options.arch or ("gfx90a", "gfx942", "gfx950"))]
    is_new = not options.out.exists()
    with options.out.open("a+", newline="") as file, tempfile.TemporaryDirectory(prefix="ck-headers-") as folder:
        file.seek(0)
        known = {(row["headers"], row["arch"], row["space"], row["name"]) for row in csv.DictReader(file)}
        table = csv.writer(file)
        if is_new:
            table.writerow(COLUMNS)
        front_end = FrontEnd(headers, Path(folder))
        draws = {
            (family, place): Draw(arch, space, family, headers, options.seed).rows(place + place // 3)
            for family in options.family or Family
            for place, (space, arch) in enumerate(places)
        }
        for number in range(options.rows):
            space, arch = places[number % len(places)]
            for family in options.family or Family:
                try:
                    drawn = next(draws[family, number % len(places)], None)
                except UsageError:  # an arch that the revision lacks
                    drawn = None
                if drawn is None or (headers, arch, space, drawn.kernel.name) in known:
                    continue
                verdict, why, seconds = front_end.judge(drawn.kernel)
                says = agrees(drawn.rules, verdict)
                cells = (headers, arch, space, family.value, drawn.kernel.name, " ".join(drawn.rules), verdict, says)
                table.writerow([*cells, f"{seconds:.1f}", why])
                file.flush()
    print_table(options.out)


if __name__ == "__main__":
    try:
        main()
    except CatalogError as error:
        raise SystemExit(error.printed) from None
