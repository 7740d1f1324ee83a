"""Parameters layer by layer in the engine change no number. Here in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import fedexp as fx
from fedexp.engine import local_steps
from fedexp.engine.batched import Batched, Implementation
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.simulation import run_round
from fedexp.tasks import Task
from tests.engine.test_engines_agree import EXACT, unequal
from tests.engine.test_stacked import images
from tests.helpers.rules import ALGORITHMS, rule_id


@dataclass(frozen=True)
class Halved(fx.ClientRule):
    """A correction that says of itself what it does, and not by a drift."""

    def correct(
        self,
        grad: Tensor,
        params: Tensor,
        start: Tensor,
        broadcast: object,
        local: object,
    ) -> Tensor:
        return grad / 2


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which local_steps were taken."""
    names: list[str] = []
    for kind in (local_steps.RowWalk, local_steps.LayerWalk):
        step = kind.step

        def noted(self: object, *args: object, step: Callable[..., None] = step) -> None:
            names.append(type(self).__name__)
            step(self, *args)

        monkeypatch.setattr(kind, "step", noted)
    return names


def visited(task: Task, algorithm: fx.Algorithm, form: Implementation) -> list[Tensor]:
    engine = Batched(form)
    state, found = fx.SimulationState.initial(task, algorithm, 0), []
    for t in range(1, 4):
        clients = sample_cohort(0, t, task.train.clients, 3)
        work = Work(task, algorithm, task.local, "uniform", 0, t, clients)
        state = run_round(work, state, engine).state
        found.append(state.params)
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_layer_by_layer_is_row_by_row(algorithm: fx.Algorithm, taken: list[str]) -> None:
    for task in (images(), unequal()):
        taken.clear()
        by_layer, by_row = visited(task, algorithm, "layers"), visited(task, algorithm, "vmap")
        assert set(taken) == {"LayerWalk", "RowWalk"}
        for one, other in zip(by_layer, by_row, strict=True):
            torch.testing.assert_close(one, other, **EXACT)


def test_rules_that_are_not_linear_are_batched_by_vmap() -> None:
    algorithm = fx.Algorithm(client=Halved())
    (record,) = fx.simulate(images(), algorithm, 1, engine="batched")
    assert record.engine == "batched (vmap)"
