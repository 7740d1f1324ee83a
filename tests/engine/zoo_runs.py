"""Runs of the zoo by the package and by plain torch, and the distance between them.

In float64 two orders of the same additions differ by 1e-16 per term, so 1e-9 of the distance that
the weights moved leaves no room for a wrong formula. In float32 rounding itself is measured: a run
may be off by four times as much as the plain float32 run is from the plain float64 run.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine.plan import plan_batches, sample_cohort
from fedexp.engine.state import Record
from fedexp.objective import Buffers, ModuleObjective
from fedexp.seeding import seeded_torch
from fedexp.tasks import Task
from tests.engine.reference import Named, Outcome, Problem, Recipe, train
from tests.engine.zoo import CASES, Case, examples
from tests.engine.zoo_models import cross_entropy

SEED, ROUNDS, COHORT, EPOCHS, BATCH = 3, 3, 3, 2, 4
EXACT = 1e-9
ROUNDING = 4.0  # times the distance between plain runs in float32 and float64
BY_NAME = {case.name: case for case in CASES}

RECIPES = (
    Recipe(lr=0.2, server="exp", eps=1e-3),
    Recipe(lr=0.1, clip=0.5, decay=0.05, client="prox", mu=0.3, server_lr=0.8),
    Recipe(lr=0.1, lr_decay=0.9, client="scaffold", server="exp", clip=1.0, decay=0.01),
    Recipe(lr=0.2, decay=0.02, server="exp", eps=1e-2, clip=0.7, weigh=True),
    Recipe(lr=0.1, client="scaffold", server_lr=1.2, weigh=True),
)


def recipe_of(case: Case) -> Recipe:
    """One of the recipes, by the name, so that it does not change when cases are added."""
    return RECIPES[zlib.crc32(case.name.encode()) % len(RECIPES)]


def algorithm_of(recipe: Recipe) -> fx.Algorithm:
    client = {"sgd": fx.SGD(), "prox": fx.Prox(recipe.mu), "scaffold": fx.Scaffold()}
    server = {"average": fx.Average(recipe.server_lr), "exp": fx.ExP(recipe.eps)}
    return fx.Algorithm("zoo", client=client[recipe.client], server=server[recipe.server])


def local_of(recipe: Recipe) -> fx.LocalTraining:
    return fx.LocalTraining(
        lr=recipe.lr, lr_decay=recipe.lr_decay, epochs=EPOCHS, batch_size=BATCH,
        clip_norm=recipe.clip, weight_decay=recipe.decay,
    )  # fmt: skip


def data_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = examples(case.data, case.labels, sum(case.sizes))
    return (x.to(dtype) if x.is_floating_point() else x), (
        y.to(dtype) if y.is_floating_point() else y
    )


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module in place; unlike `Module.to`, keep shared buffers shared."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    floating = [(b, b.to(dtype)) for b in module.buffers() if b.is_floating_point()]
    for each in module.modules():
        for name, buffer in each._buffers.items():
            for before, after in floating:
                if buffer is before:
                    each._buffers[name] = after
    return module


def task_of(case: Case, dtype: torch.dtype) -> Task:
    x, y = data_of(case, dtype)
    objective = ModuleObjective(
        lambda: cast(case.build(), dtype), case.loss, classifies=case.labels in ("classes", "each")
    )
    train = Federation({"x": x, "y": y}, np.cumsum([0, *case.sizes]))
    return Task("zoo", objective, train, local_of(recipe_of(case)))


def run(case: Case, dtype: torch.dtype, engine: str, **more: Any) -> tuple[Task, Record]:
    """Train for three rounds, evaluating each (which must change nothing); the last record."""
    task, recipe = task_of(case, dtype), recipe_of(case)
    weighting = "size" if recipe.weigh else "uniform"
    options: dict[str, Any] = {"engine": engine, "weighting": weighting, **more}
    rounds = fx.simulate(
        task, algorithm_of(recipe), ROUNDS, COHORT, SEED, evaluate_every=1, **options
    )
    return task, list(rounds)[-1]


@cache
def by_loop(name: str, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    more = {} if device == "cpu" else {"device": device, "precision": "float32"}
    return outcome(*run(BY_NAME[name], dtype, "loop", **more))


@cache
def by_reference(name: str, dtype: torch.dtype) -> Outcome:
    """The same run in plain torch, from the same weights and with the same batches."""
    case, recipe = BY_NAME[name], recipe_of(BY_NAME[name])
    x, y = data_of(case, dtype)
    local = local_of(recipe)
    problem = Problem(
        worker=initial(case, dtype),
        loss=case.loss or cross_entropy,
        clients=list(zip(x.split(case.sizes), y.split(case.sizes), strict=True)),
        cohorts=[
            sample_cohort(SEED, r, len(case.sizes), COHORT).tolist() for r in range(1, ROUNDS + 1)
        ],
        batches=lambda r, i: [b.tolist() for b in plan_batches(SEED, r, i, case.sizes[i], local)],
        draws=lambda r, i: seeded_torch(SEED, "layers", r, i),
    )
    return train(problem, recipe)


def initial(case: Case, dtype: torch.dtype) -> nn.Module:
    """Build the model under the run's seed; frozen weights are those of the first one built."""
    with seeded_torch(0, "scratch"):
        first = dict(case.build().named_parameters())
    with seeded_torch(SEED, "initial weights"):
        module = case.build()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if not weight.requires_grad:
                weight.copy_(first[name])
    return cast(module, dtype)


def outcome(task: Task, record: Record) -> Outcome:
    """The trained model of a record by name; the last iterate, not the output."""
    assert isinstance(task.objective, ModuleObjective)
    buffers = Buffers(*(value.cpu() for value in record.state.buffers))
    module = task.objective.load(record.state.params.cpu(), buffers)
    params = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    named = module.named_buffers(remove_duplicate=False)  # a shared one may have been split
    averaged = {n: b.detach() for n, b in named if b.is_floating_point()}
    assert record.server_lr is not None, "every client was dropped"
    return Outcome(params, averaged, (record.server_lr,))


@dataclass(frozen=True)
class Gap:
    """How far two runs are apart: parameters by the distance they moved, buffers by their norm."""

    params: float
    buffers: float


def gap(one: Outcome, other: Outcome, case: Case) -> Gap:
    start = {n: p.detach() for n, p in initial(case, torch.float64).named_parameters()}
    assert one.params.keys() == other.params.keys()
    assert one.buffers.keys() >= other.buffers.keys()
    distance = _norm({n: p.double() - start[n] for n, p in other.params.items()})
    assert distance > 1e-2, "the weights must move, else nothing is compared"
    held = _norm(_finite(other.buffers)) or 1.0
    return Gap(
        _norm(_difference(one.params, other.params)) / distance,
        _norm(_difference(one.buffers, other.buffers)) / held,
    )


def _difference(one: Named, other: Named) -> Named:
    """Differences in float64; equal infinities (of a mask) are no difference."""
    pairs = {n: (one[n].double(), other[n].double()) for n in other}
    return {n: torch.where(a == b, 0.0, a - b) for n, (a, b) in pairs.items()}


def _finite(named: Named) -> Named:
    return {n: torch.where(v.isfinite(), v, 0).double() for n, v in named.items()}


def _norm(named: Named) -> float:
    return float(sum(value.square().sum() for value in named.values())) ** 0.5


def assert_as_exact(ours: Outcome, case: Case) -> None:
    """Assert that a float32 run is as near to the exact one as plain float32 arithmetic is."""
    if case.draws:  # in float64 it draws other numbers
        found, allowed = gap(ours, by_reference(case.name, torch.float32), case), Gap(1e-5, 1e-5)
    else:
        exact = by_reference(case.name, torch.float64)
        found = gap(ours, exact, case)
        plain = gap(by_reference(case.name, torch.float32), exact, case)
        # lucky cancellation must not make rounding of the weights themselves an error
        least = 2**-23 * _norm({n: v.double() for n, v in exact.params.items()})
        least = max(least, 2**-23)
        allowed = Gap(ROUNDING * max(plain.params, least), ROUNDING * max(plain.buffers, least))
    assert found.params <= allowed.params
    assert found.buffers <= allowed.buffers
