"""Simulations whose results must not depend on the number of ranks.

cases.py FOLDER WORLD_SIZE...    run every case for each world size; write the results to FOLDER

Ranks are forked, so that torch is imported once.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import fedexp as fx
from fedexp.data import Federation
from fedexp.distributed import DistributedGroup, Ranks
from fedexp.objective import ModuleObjective
from fedexp.privacy import CentralPrivacy, LocalPrivacy, PrivacyWarning
from fedexp.tasks import Mean, Task, supervised
from tests.distributed.launch import joined, on_ranks
from tests.helpers.problems import BatchNormNet, Net, dropout_net, least_squares

ROUNDS = 4
SIZES = (3, 40, 17, 8, 2, 25, 12)
BROKEN = 3  # a label whose gradient is NaN
Result = tuple[list[dict[str, Any]], Tensor, dict[tuple[int, str], Tensor]]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()


def of_batch(output: Tensor, y: Tensor) -> Tensor:
    """Return the loss of a batch, which is no mean over examples."""
    return F.cross_entropy(output, y).square()


class Spread:
    """A metric with state, as torchmetrics has them: the range of all outputs."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.low, self.high = torch.inf, -torch.inf

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.low = min(self.low, outputs.min().item())
        self.high = max(self.high, outputs.max().item())

    def merge_state(self, incoming_state: Spread) -> None:
        self.low = min(self.low, incoming_state.low)
        self.high = max(self.high, incoming_state.high)

    def compute(self) -> float:
        return self.high - self.low


def spiked_loss(output: Tensor, y: Tensor) -> Tensor:
    """Return a cross-entropy whose gradient, but not its value, is NaN for the broken label."""
    zero = torch.where(y == BROKEN, output[:, 0] - output[:, 0], 1.0)
    spike = torch.where(y == BROKEN, zero.sqrt(), 0.0)
    return nn.functional.cross_entropy(output, y.clamp(max=2), reduction="none") + spike


def unequal(build: Callable[[], nn.Module], broken: tuple[int, ...] = ()) -> Task:
    """Build a task with clients of many sizes, some of which send non-finite updates."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, sum(SIZES))
    x = rng.normal(size=(3, 4))[y] + rng.normal(size=(len(y), 4))
    offsets = np.cumsum([0, *SIZES])
    for client in broken:
        y[offsets[client] : offsets[client + 1]] = BROKEN
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(y)}
    objective = ModuleObjective(build, spiked_loss) if broken else ModuleObjective(build)
    local = fx.LocalTraining(lr=0.1, epochs=2, batch_size=8)
    return Task("unequal", objective, Federation(fields, offsets), local, fields)


def net() -> Task:
    return unequal(lambda: Net().double())


def batch_norm() -> Task:
    task = unequal(lambda: BatchNormNet().double())
    # BatchNorm needs two examples in every batch
    return replace(task, local=replace(task.local, epochs=None, steps=3, batch_size=None))


def few_test_examples() -> Task:
    task = net()
    assert task.test is not None
    return replace(task, test={name: value[:2] for name, value in task.test.items()})


def measured(loss: Any) -> Task:
    """Build a task with metrics of every kind, on test examples of clients."""
    plain = net()
    metrics: dict[str, Any] = {
        "largest": lambda outputs, y: outputs.abs().max(),
        "margin": Mean(lambda outputs, y: outputs.max(dim=1).values),
        "spread": Spread(),
    }
    return supervised(
        "measured",
        lambda: Net().double(),
        plain.train,
        plain.train,
        loss,
        metrics,
        by_client=True,
        train_metrics="clients",
        local=plain.local,
    )


CASES: dict[str, Callable[[], tuple[Task, fx.Algorithm, dict[str, Any]]]] = {
    "fedexp-loop": lambda: (net(), fx.fedexp(), {"engine": "loop", "cohort": 5}),
    "fedexp-vectorized": lambda: (net(), fx.fedexp(), {"engine": "batched", "cohort": 5}),
    "scaffold-loop": lambda: (net(), fx.scaffold(), {"engine": "loop", "cohort": 5}),
    "scaffold-exp": lambda: (net(), fx.scaffold_exp(), {"engine": "batched", "cohort": 5}),
    "fedadagrad": lambda: (net(), fx.fedadagrad(), {"cohort": 5, "weighting": "size"}),
    "fednova": lambda: (net(), fx.fednova(), {"cohort": 5, "weighting": "size"}),
    "fedexprox-stops": lambda: (few_test_examples(), fx.fedexprox_stops(), {"cohort": 1}),
    "dense-engine": lambda: (unequal(plain), fx.scaffold_exp(), {"cohort": 6}),
    "linear-engine": lambda: (least_squares(clients=7), fx.scaffold_exp(), {"cohort": 5}),
    "chosen-cohorts": lambda: (
        net(),
        fx.scaffold_exp(),
        {"engine": "batched", "cohort": fx.cohorts.available(lambda round, federation: 0.5)},
    ),
    "adam": lambda: (
        net(),
        fx.fedexp(),
        {
            "cohort": 5,
            "local": fx.LocalTraining(
                lr=0.01, epochs=2, batch_size=8, optimizer="adam", lr_schedule="cosine"
            ),
        },
    ),
    "diloco": lambda: (
        net(),
        fx.diloco(),
        {
            "cohort": 5,
            "local": fx.diloco_local(lr=0.01, steps=None, epochs=2, batch_size=8, warmup_steps=7),
        },
    ),
    "batch-norm-loop": lambda: (batch_norm(), fx.scaffold(), {"engine": "loop", "cohort": 3}),
    "batch-norm": lambda: (batch_norm(), fx.fedexp(), {"engine": "batched", "cohort": 3}),
    "metrics": lambda: (measured(F.cross_entropy), fx.fedexp(), {"cohort": 5}),
    "batch-loss": lambda: (measured(of_batch), fx.fedexp(), {"cohort": 5}),
    "bound": lambda: (
        batch_norm(),
        replace(fx.scaffold_exp(), bound=1.0),
        {"cohort": 3, "weighting": "size"},
    ),
    "bound-alone": lambda: (net(), fx.fedexp(bound=1.0), {"cohort": 1}),
    "more-ranks-than-clients": lambda: (few_test_examples(), fx.scaffold_exp(), {"cohort": 1}),
    "dropout-loop": lambda: (
        unequal(lambda: dropout_net().double()),
        fx.fedexp(),
        {"engine": "loop"},
    ),
    "broken-loop": lambda: (
        unequal(lambda: Net().double(), (1, 4)),
        fx.scaffold_exp(),
        {"engine": "loop", "cohort": 6},
    ),
    "broken": lambda: (
        unequal(lambda: Net().double(), (1, 4)),
        fx.scaffold_exp(),
        {"engine": "batched"},
    ),
    "central-privacy": lambda: (
        net(),
        fx.fedexp(),
        {"cohort": 5, "privacy": CentralPrivacy(0.5, 1e-2, noise_multiplier=0.1)},
    ),
    "local-privacy": lambda: (
        net(),
        fx.fedexp(),
        {"cohort": 5, "privacy": LocalPrivacy(0.5, 1e-2, noise_multiplier=0.1)},
    ),
    "poisson-cohorts": lambda: (
        net(),
        fx.fedexp(),
        {
            "cohort": 1,
            "privacy": CentralPrivacy(0.5, 1e-2, noise_multiplier=0.5, sampling="poisson"),
        },
    ),
    "all-broken": lambda: (
        unequal(lambda: Net().double(), tuple(range(len(SIZES)))),
        fx.fedexp_m(),
        {"engine": "loop", "cohort": 3},  # other engines cannot be checked without a finite update
    ),
}


def result(name: str, ranks: Ranks | None = None) -> Result:
    """Return the rows, the output model and the client states of a case."""
    task, algorithm, options = CASES[name]()
    process_group = DistributedGroup(ranks) if ranks else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fx.NonFiniteUpdateWarning)
        warnings.simplefilter("ignore", PrivacyWarning)
        records = list(fx.simulate(task, algorithm, ROUNDS, process_group=process_group, **options))
    state = records[-1].state
    rows = [
        {k: v for k, v in r.to_json().items() if k != "seconds" and v is not None} for r in records
    ]
    states = {(c, name): value for c, each in state.clients.items() for name, value in each.items()}
    return rows, torch.cat([state.output()[0], state.buffers.averaged]), states


def refusal(ranks: Ranks) -> str:
    """Return the error of a run in which every rank has a different model."""
    try:
        list(
            fx.simulate(
                net(), fx.fedexp(), 2, seed=ranks.rank, process_group=DistributedGroup(ranks)
            )
        )
    except fx.FedExPError as error:
        return str(error)
    return ""


def all_cases(folder: Path, ranks: Ranks) -> None:
    """Run all cases on one rank."""
    results: dict[str, Any] = {name: result(name, ranks) for name in CASES}
    results["drift"] = refusal(ranks)
    torch.save(results, folder / f"{ranks.world_size}-{ranks.rank}.pt")


if __name__ == "__main__":
    import torch._dynamo  # what torch.func would import in every rank

    for world_size in map(int, sys.argv[2:]):
        codes = on_ranks(world_size, joined, partial(all_cases, Path(sys.argv[1])))
        assert codes == [0] * world_size
