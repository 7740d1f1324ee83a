"""All that an archive says: its runs, and what each study of the paper makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from fedexp.reproduce import STUDIES
from fedexp.reproduce.from_runs import is_superseded, plan_from
from fedexp.reproduce.measures import grouped
from fedexp.reproduce.output import Groups
from fedexp.reproduce.study import Findings, Plan, Request, Result
from fedexp.runs import StoredRun, find_runs, load_run, spec_from

PAPER, RELEASED = "paper", "authors-code"
# toy leaves no records: it is traced each time anew.
NAMES = tuple(name for name in STUDIES if STUDIES[name].runs())


@dataclass(frozen=True)
class Studied:
    """A study in one mode, with the runs that the archive has of it; none where `results` is empty.

    Attributes:
        plan: the study, its tasks and what is missing.
        results: the runs.
        findings: table and checks; None where there are no runs.
    """

    plan: Plan
    results: tuple[Result, ...]
    findings: Findings | None

    @cached_property
    def groups(self) -> Groups:
        return grouped(self.results)


@dataclass(frozen=True)
class Results:
    """An archive, read."""

    runs: tuple[StoredRun, ...]

    @cached_property
    def studies(self) -> dict[str, Studied]:
        """Every study as the paper has it."""
        return {name: study_of(name, PAPER, self.runs) for name in NAMES}

    @cached_property
    def released(self) -> dict[str, Studied]:
        """The same with what the released code does."""
        return {name: study_of(name, RELEASED, self.runs) for name in NAMES}

    @cached_property
    def every(self) -> tuple[Studied, ...]:
        """All studies in both modes with superseded runs too, unless they have a successor."""
        current = {_identity(run) for run in self.runs if not is_superseded(run)}
        kept = [r for r in self.runs if not is_superseded(r) or _identity(r) not in current]
        return tuple(
            study_of(name, mode, kept, True) for mode in (PAPER, RELEASED) for name in NAMES
        )


def _identity(run: StoredRun) -> str:
    """What the command line decides about a run: not what versions of fedexp make of it."""
    return repr(replace(spec_from(run.spec), device=None, precision=None))


def study_of(
    name: str, mode: str, runs: Sequence[StoredRun], count_superseded: bool = False
) -> Studied:
    """What the archive has of a study in one mode."""
    request = Request(mode=mode)
    plan, results = plan_from(STUDIES[name], request, runs, count_superseded=count_superseded)
    findings = plan.study.measure(plan, results) if plan.tasks else None
    return Studied(plan, tuple(results), findings)


def load_results(folder: Path) -> Results:
    """The runs of an archive; it may be empty."""
    found = find_runs([folder]) if any(folder.rglob("*.toml")) else []
    return Results(tuple(load_run(path) for path in found))
