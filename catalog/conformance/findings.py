"""The findings of a conformance run, one per check and subject."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from catalog.schema.traits import Word

COLUMNS = ("arch", "check", "subject", "verdict", "about")
"""The columns of a report."""


class Verdict(Word):
    """The outcome of a check; only a failure counts against the arch."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOTED = "noted"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: the check, its subject, the verdict and the reason."""

    check: str
    subject: str
    verdict: Verdict
    about: str = ""


OnFinding = Callable[[Finding], None]


def passed(check: str, subject: str, about: str = "") -> Finding:
    """A finding that passed."""
    return Finding(check, subject, Verdict.PASSED, about)


def failed(check: str, subject: str, about: str) -> Finding:
    """A finding against the arch."""
    return Finding(check, subject, Verdict.FAILED, about)


def skipped(check: str, subject: str, about: str) -> Finding:
    """A check that could not be done here, and why."""
    return Finding(check, subject, Verdict.SKIPPED, about)


@dataclass(frozen=True)
class Report:
    """All findings about an arch, in the order of the checks.

    ``revision`` is the requested one; None: the arch's own.
    """

    arch: str
    revision: str | None
    findings: Sequence[Finding]

    @property
    def title(self) -> str:
        """The arch, and the revision where one was named."""
        return self.arch if self.revision is None else f"{self.arch} {self.revision}"

    def rows(self, *verdicts: Verdict) -> list[tuple[str, ...]]:
        """The findings with these verdicts, each as the values of :data:`COLUMNS`."""
        return [
            (self.title, finding.check, finding.subject, str(finding.verdict), finding.about)
            for finding in self.findings
            if finding.verdict in verdicts
        ]

    def count(self, verdict: Verdict) -> int:
        """The number of findings with this verdict."""
        return sum(finding.verdict is verdict for finding in self.findings)

    @property
    def conforms(self) -> bool:
        """Whether nothing failed."""
        return not self.count(Verdict.FAILED)

    @property
    def summary(self) -> str:
        """The numbers of findings, as a sentence."""
        counts = ", ".join(f"{self.count(verdict):,} {verdict}" for verdict in Verdict if self.count(verdict))
        return f"{self.title} {'conforms' if self.conforms else 'DOES NOT CONFORM'}: {counts}."
