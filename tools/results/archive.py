"""The archive: its runs, and the findings of each study of the paper from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedexp.reproduce import STUDIES
from fedexp.reproduce.from_runs import plan_from
from fedexp.reproduce.measures import grouped
from fedexp.reproduce.output import Groups
from fedexp.reproduce.study import Findings, Plan, Request
from fedexp.runs import StoredRun, find_runs, load_run

PAPER, RELEASED = "paper", "authors-code"
NAMES = tuple(name for name in STUDIES if STUDIES[name].runs())  # toy has no stored runs


@dataclass(frozen=True)
class StoredStudy:
    """A study in one mode, from the runs of the archive.

    Attributes:
        plan: the study, its tasks and what is missing.
        groups: the outcomes by task and series, one per seed.
        findings: table and checks; None if there are no runs.
    """

    plan: Plan
    groups: Groups
    findings: Findings | None


@dataclass(frozen=True)
class Archive:
    """Stored runs and the studies they belong to."""

    runs: tuple[StoredRun, ...]

    @cached_property
    def studies(self) -> dict[str, StoredStudy]:
        """Every study in mode paper."""
        return {name: stored_study(name, PAPER, self.runs) for name in NAMES}

    @cached_property
    def released(self) -> dict[str, StoredStudy]:
        """Every study in mode authors-code."""
        return {name: stored_study(name, RELEASED, self.runs) for name in NAMES}

    @cached_property
    def every(self) -> tuple[StoredStudy, ...]:
        """All studies in both modes."""
        return (*self.studies.values(), *self.released.values())


def load_archive(folder: Path) -> Archive:
    """Load the runs of an archive, which may be empty."""
    found = find_runs([folder]) if any(folder.rglob("*.toml")) else []
    return Archive(tuple(load_run(path) for path in found))


def stored_study(name: str, mode: str, runs: Sequence[StoredRun]) -> StoredStudy:
    """Return what stored runs make of a study in one mode."""
    plan, results = plan_from(STUDIES[name], Request(mode=mode), runs)
    findings = plan.study.measure(plan, results) if plan.tasks else None
    return StoredStudy(plan, grouped(results), findings)
