"""`Study`: a table or figure of the paper as runs to make and numbers to hold against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedexp.experiments.outcome import Outcome
from fedexp.experiments.spec import Spec
from fedexp.precision import Precision, default_precision
from fedexp.studies.published import Claim
from fedexp.studies.reproduce.lines import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Request:
    """What the user asks for; None leaves it to the study.

    Attributes:
        rounds: rounds of every run.
        seeds: seeds 0 to seeds - 1.
        tasks: some of the study's tasks; empty for all whose data are here.
        small: whether to shrink data, model and rounds to what a CPU does in minutes.
        mode: "paper" or "authors-code".
        device: e.g. "cuda"; None for the CPU.
        precision: arithmetic inside the model.
    """

    rounds: int | None = None
    seeds: int | None = None
    tasks: tuple[str, ...] = ()
    small: bool = False
    mode: str = "paper"
    device: str | None = None
    precision: Precision | None = None


@dataclass(frozen=True)
class Arm:
    """One curve of a study: an algorithm with the options that set it apart."""

    series: str
    algorithm: str
    options: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Job:
    """A run of a study: the paper's task, the arm's series, and the spec that is run."""

    task: str
    series: str
    spec: Spec


@dataclass(frozen=True)
class Result:
    """A job that was run."""

    job: Job
    outcome: Outcome


@dataclass(frozen=True)
class Plan:
    """A request made concrete.

    Attributes:
        study: the study.
        request: what was asked for.
        tasks: the tasks that are run.
        rounds: rounds of every run.
        jobs: the runs, in order.
        shrunk: a line for each way in which the study is smaller than the paper's, or longer.
        left_out: a line for each task that is not run, with the remedy.
        comparable: whether differences from the published figures mean anything.
        partial: tasks whose differences mean nothing, because their data are not all there.
    """

    study: Study
    request: Request
    tasks: tuple[str, ...]
    rounds: int
    jobs: tuple[Job, ...] = ()
    shrunk: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    comparable: bool = True
    partial: tuple[str, ...] = ()

    @property
    def devices(self) -> str:
        """Where the runs are made."""
        return " and ".join(dict.fromkeys(job.spec.device or "cpu" for job in self.jobs)) or "cpu"

    @property
    def arithmetic(self) -> str:
        """The precision of the runs; where there are several, all of them."""
        return " and ".join(dict.fromkeys(arithmetic_of(job.spec) for job in self.jobs))

    @property
    def word(self) -> str:
        """What became of the paper's study, in a word; nothing where it is the paper's."""
        if not self.shrunk:
            return ""
        longer = self.rounds > self.study.rounds and len(self.shrunk) == 1
        return "changed" if longer else "shrunk"


def arithmetic_of(spec: Spec) -> str:
    """The precision asked for, or what suits the device: on a CPU the type of the weights."""
    there = torch.device(spec.device or "cpu")
    own = "the type of the weights" if there.type == "cpu" else default_precision(there)
    return spec.precision or own


@dataclass(frozen=True)
class Check:
    """A claim of the paper held against what was seen; `holds` is None where it cannot be told."""

    claim: Claim
    holds: bool | None
    seen: str
    task: str = ""

    def line(self) -> str:
        """`task: claim: yes (what was seen)`."""
        word = "cannot tell" if self.holds is None else "yes" if self.holds else "no"
        task = f"{self.task}: " if self.task else ""
        return f"{task}{self.claim.text}: {word} ({self.seen})"


@dataclass(frozen=True)
class Findings:
    """What a study found: a table, checks of what the paper says, and a way to draw it."""

    table: Table
    checks: tuple[Check, ...]
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Study:
    """A study of the paper.

    Attributes:
        name: what the command line calls it.
        title: the table or figure and what it shows.
        needs: what it takes to run it in full, in words.
        rounds: the paper's number of rounds.
        seeds: the paper's number of seeds, by task; these are the study's tasks, in order.
        arms: the curves on a task.
        measure: the findings, from the plan and its results.
        evaluate_every: rounds between evaluations.
        small_rounds: rounds when shrunk.
        whole: whether a task without some of its arms says nothing.
        remarks: what the paper leaves open, and what is done here.
    """

    name: str
    title: str
    needs: str
    rounds: int
    seeds: Mapping[str, int]
    arms: Callable[[str], Sequence[Arm]]
    measure: Callable[[Plan, Sequence[Result]], Findings]
    evaluate_every: int = 5
    small_rounds: int = 20
    whole: bool = False
    remarks: tuple[str, ...] = field(default=())

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.seeds)

    def runs(self) -> int:
        """How many runs the whole study takes."""
        return sum(len(self.arms(task)) * seeds for task, seeds in self.seeds.items())

    def cost(self) -> str:
        """What it takes, in a few words."""
        runs = self.runs()
        return f"{runs} runs of {self.rounds:,} rounds; {self.needs}" if runs else self.needs
