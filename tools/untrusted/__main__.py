"""Attack server rules, and write results/untrusted/runs.csv and its tables.

python -m tools.untrusted --seconds 3600        # runs what is missing; again to continue
python -m tools.untrusted --tables              # the tables of docs/untrusted-clients.md
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import astuple, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedexp as fx
from fedexp.aggregate import Aggregate
from fedexp.engine.base import Run, Sums
from fedexp.engine.plan import Work
from fedexp.engine.simulation import ProcessGroup
from fedexp.engine.state import SimulationState
from fedexp.errors import DivergedError
from fedexp.seeding import generator
from fedexp.tasks import Task
from tools.grid import RESULTS, read_csv, write_csv
from tools.untrusted.protocol import (
    ATTACKS,
    FEDAVG,
    LAST,
    RULES,
    TASKS,
    TRIMMED,
    Case,
    Scene,
    cases,
)
from tools.untrusted.report import draw, tables

FILE = RESULTS / "untrusted" / "runs.csv"
PICTURE = Path("docs", "images", "untrusted-clients.svg")
HEADERS = (*(field.name for field in fields(Case)), "accuracy", "longest_step", "diverged")


class Hostile(ProcessGroup):
    """A simulated run in which some clients attack, and the server may use a rule of Flower's.

    It changes updates where private runs clip theirs: after local training, before the sums.
    """

    def __init__(self, case: Case, attackers: frozenset[int]) -> None:
        self.case, self.attackers = case, attackers
        self.attack = ATTACKS[case.attack]
        self.first: dict[int, Tensor] = {}
        self.updates: list[Tensor] = []

    def engine(self, engine: Any) -> Run:
        return partial(self._run, engine)

    def _run(self, engine: Run, work: Work, state: SimulationState) -> Sums:
        hostile: Any = self
        self.updates = []
        sums, changed = engine(replace(work, privacy=hostile), state)
        if self.case.protection not in RULES:
            mean = robust_mean(self.case, torch.cat(self.updates), state.params)
            sums = Aggregate.of(mean[None])
        return sums, changed

    def bits(self, deltas: Tensor) -> dict[str, Tensor]:
        """Return nothing: attacks are in the updates."""
        return {}

    def protected(self, deltas: Tensor, clients: Sequence[int], round: int) -> Tensor:
        """Return updates [K, d] of these clients, those of attackers replaced."""
        hostile = torch.tensor([client in self.attackers for client in clients])
        after = deltas.clone()
        if self.attack is not None and bool((~hostile).any()):
            for k in hostile.nonzero()[:, 0].tolist():
                scene = Scene(self.case.seed, round, clients[k], deltas[~hostile], self.first)
                after[k] = self.attack(deltas[k], scene)
        self.updates.append(after)
        return after


def robust_mean(case: Case, deltas: Tensor, params: Tensor) -> Tensor:
    """Return the update of Flower's robust rules, by Flower's own functions."""
    from flwr.app import ArrayRecord, RecordDict
    from flwr.serverapp.strategy import fedtrimmedavg, multikrum

    models = (params - deltas).numpy()
    if case.protection == "FedMedian":
        model = np.median(models, axis=0)
    elif case.protection == "FedTrimmedAvg":
        model = fedtrimmedavg.trim_mean(models, TRIMMED)
    else:
        contents = [RecordDict({"m": ArrayRecord(numpy_ndarrays=[row])}) for row in models]
        number = max(1, round(case.share * len(models)))
        (chosen,) = multikrum.select_multikrum(contents, number, 1)
        model = chosen.array_records["m"].to_numpy_ndarrays()[0]
    return params - torch.from_numpy(np.asarray(model, dtype=np.float32))


@cache
def task_of(name: str) -> Task:
    return TASKS[name]()


def attacked_task(case: Case) -> tuple[Task, frozenset[int]]:
    """Return the task, with wrong labels where that is the attack, and the attackers."""
    task = task_of(case.task)
    train = task.train
    order = generator(case.seed, "attackers").permutation(train.clients)
    attackers = frozenset(order[: round(case.share * train.clients)].tolist())
    if case.attack == "none":
        return task, frozenset()
    if case.attack == "wrong labels":
        y = train.fields["y"].clone()
        for client in attackers:
            rows = slice(int(train.offsets[client]), int(train.offsets[client + 1]))
            y[rows] = int(y.max()) - y[rows]
        task = replace(task, train=replace(train, fields={**train.fields, "y": y}))
    return task, attackers


def run(case: Case) -> tuple[float, float, str]:
    """Return the final accuracy in percent, the longest step, and the round of a divergence."""
    task, attackers = attacked_task(case)
    algorithm = RULES.get(case.protection, FEDAVG)
    first = task.rounds - LAST + 1
    accuracies, longest = [], 0.0
    try:
        for record in fx.simulate(
            task,
            algorithm,
            seed=case.seed,
            evaluate_every=(task.rounds, LAST),
            engine="loop",
            process_group=Hostile(case, attackers),
        ):
            longest = max(longest, record.server_lr or 0.0)
            if record.round >= first and record.test_accuracy is not None:
                accuracies.append(100 * record.test_accuracy)
    except DivergedError as error:
        return float("nan"), longest, str(error.round)
    return float(np.mean(accuracies)), longest, ""


def missing(path: Path, tasks: Collection[str]) -> Iterator[Case]:
    """Yield the runs of some tasks that the file does not have."""
    names = [field.name for field in fields(Case)]
    done = {tuple(row[name] for name in names) for row in read_csv(path)}
    for case in cases():
        if case.task in tasks and tuple(map(str, astuple(case))) not in done:
            yield case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names with commas")
    parser.add_argument("--tables", action="store_true", help="print and draw; run nothing")
    parser.add_argument("--file", type=Path, default=FILE)
    args = parser.parse_args()
    if args.tables:
        print(tables(read_csv(args.file)))
        draw("digits", read_csv(args.file), PICTURE)
        return
    end = time.monotonic() + args.seconds
    for number, case in enumerate(missing(args.file, args.tasks.split(",")), 1):
        if time.monotonic() > end:
            break
        accuracy, longest, diverged = run(case)
        line = [*astuple(case), f"{accuracy:.2f}", f"{longest:.2f}", diverged]
        before = [list(row.values()) for row in read_csv(args.file)]
        write_csv(args.file, HEADERS, [*before, line])
        print(number, *line, flush=True)


if __name__ == "__main__":
    main()
