"""Translation units of upstream's kernels, written by the generator of the user's own CK checkout.

The generator is asked for one kernel by name, in a scratch folder; the checkout is only read. Its output is stored
under a hash of the request and of the generator's own files, so that a kernel in the cache is found without running it
again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from catalog.build.generators import run_generator
from catalog.build.keys import hash_parts
from catalog.build.toolchains import read_facts
from catalog.errors import BuildError, GeneratorError, UsageError
from catalog.files import MOST_TEXT_BYTES, Sync, publish, read_own
from catalog.ops.attention.kernels.ck.headers import revision_of
from catalog.ops.attention.upstream.live import FmhaGenerator, find_generator
from catalog.schema.kernel import Kernel
from catalog.settings import settings

GENERATOR_TIMEOUT_SECONDS = 300.0


class _Listed(BaseModel):
    receipt: int


class _CkSpec(BaseModel):
    receipts: list[_Listed]


def _receipts(revision: str) -> list[int]:
    """The receipts of a revision in ascending order, from the spec that its archs extend."""
    spec = read_facts(_CkSpec, f"arch_specs/{revision}/ck.json")
    return sorted(listed.receipt for listed in spec.receipts)


class FamilyFacts(BaseModel):
    """How to ask upstream's generator for a kernel of a family, its flags, and what a launch does first."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api: str
    filter: str
    flags: tuple[str, ...] = ()
    before: Literal["nothing", "rotate_copy", "clear_dq"] = "nothing"


class CkFacts(BaseModel):
    """The content of ``data/toolchains/ck.json``; ``fallback`` selects a forward kernel that every arch has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    fallback: str
    families: dict[str, FamilyFacts]


def ck_facts() -> CkFacts:
    """Facts about upstream's generator.

    Raises:
        SpecError: the file is missing or malformed; the message names it and the field.
    """
    return read_facts(CkFacts, "toolchains/ck.json")


def family_flags(family: str) -> tuple[str, ...]:
    """Compiler flags for kernels of a family, in addition to those of their arch.

    Raises:
        SpecError: ``data/toolchains/ck.json`` is missing or malformed.
    """
    return ck_facts().families[family].flags


@dataclass(frozen=True)
class Checkout:
    """A CK checkout: its generator, and the include folders of its kernels."""

    generator: FmhaGenerator
    example: Path
    include: Path

    @functools.cached_property
    def headers(self) -> str:
        """The revision of its headers, as in ``data/toolchains/ck_headers.json``; the generator's may differ.

        Raises:
            BuildError: they are of no known revision.
        """
        return revision_of(self.include)

    def source(self, kernel: Kernel, memory: Path) -> str:
        """The translation unit of ``kernel``; ``memory`` is a folder for stored results.

        Raises:
            BuildError: the checkout is of another revision, or its generator fails or does not know the kernel.
        """
        if not kernel.base and kernel.revision != self.generator.revision:
            raise BuildError(
                f"kernel {kernel.name} is of revision {kernel.revision}; {self.generator.path} is detected as revision "
                f"{self.generator.revision}",
                hint=f"CATALOG_CK_ROOT or --ck-root names a checkout of revision {kernel.revision}.",
            )
        question = {"checkout": [self.generator.digest], "kernel": [kernel.name, kernel.arch, kernel.variant]}
        remembered = memory / f"{hash_parts(question)}.cpp"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return read_own(remembered, MOST_TEXT_BYTES).decode()
        text = self._ask(kernel)
        with contextlib.suppress(OSError):
            publish(remembered, text, Sync.NONE)
        return text

    def _ask(self, kernel: Kernel) -> str:
        facts = ck_facts().families[kernel.family]
        if facts.api not in self.generator.apis:
            raise BuildError(
                f"kernel {kernel.name}: {self.generator.path} has no API {facts.api}",
                hint=f"It has: {', '.join(self.generator.apis)}.",
            )
        receipts = self.generator.receipts if kernel.base else _receipts(kernel.revision)
        for receipt in receipts:
            text = self._write(kernel, facts, ["--mask", kernel.variant, "--receipt", str(receipt)])
            if text is not None:
                return text
        raise BuildError(
            f"{self.generator.path} knows no kernel {kernel.name} in any of its receipts "
            f"{', '.join(map(str, receipts))}; the row is of revision {kernel.revision}",
            hint=f"catalog adopted {kernel.revision} shows the checkout that it was adopted from."
            if kernel.base
            else f"catalog parity --ck-root {self.generator.path} shows how the checkout differs from that revision.",
        )

    def _write(self, kernel: Kernel, facts: FamilyFacts, options: Sequence[str]) -> str | None:
        targets = ["--targets", kernel.arch] if self.generator.takes_targets else []
        name = kernel.name.removesuffix(f"_{kernel.target}")  # filters see names without it
        asked = ["--api", facts.api, "--filter", facts.filter.format(name=name), "--output_dir", "."]
        command = [sys.executable, str(self.generator.path), *asked, *options, *targets]
        with tempfile.TemporaryDirectory(prefix="catalog-ck-") as scratch:
            try:
                run_generator(command, Path(scratch), GENERATOR_TIMEOUT_SECONDS, threading.Event())
                return next(Path(scratch).rglob(f"{kernel.name}.cpp")).read_text()
            except GeneratorError as error:
                raise BuildError(error.message, hint=error.hint) from None
            except StopIteration:
                return None


@functools.cache
def open_checkout(root: Path) -> Checkout:
    """The CK checkout at ``root`` or inside it.

    Raises:
        BuildError: there is none, or its headers are missing.
    """
    try:
        generator = find_generator(root, GENERATOR_TIMEOUT_SECONDS)
        generator.revision  # noqa: B018 - runs it, so that another program is refused
    except (UsageError, GeneratorError) as error:
        raise BuildError(error.message, hint=error.hint) from None
    example = generator.path.parent
    for above in example.parents:
        if (above / "include" / "ck_tile").is_dir():
            return Checkout(generator, example, above / "include")
    raise BuildError(f"{example}: no folder above it has CK's headers, include/ck_tile", hint="Is it complete?")


def find_checkout() -> Checkout:
    """The checkout named in the settings, or that of a ROCm installation.

    Raises:
        BuildError: there is none.
    """
    chosen = settings()
    if chosen.ck_root is not None:
        return open_checkout(chosen.ck_root)
    from catalog.build.hip.toolchain import rocm_root

    try:
        return open_checkout(rocm_root())
    except BuildError:
        raise BuildError(
            "kernels of AMD archs come from a CK checkout, and none is named",
            hint="CATALOG_CK_ROOT or --ck-root names one: a clone of composable_kernel, or what carries it inside, "
            "such as the source distribution of flash-attn.",
        ) from None
