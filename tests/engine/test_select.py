"""Which engine runs: the one that was asked for, or the fastest that suits, and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.engine import EngineChoice
from fedexp.engine.batched import Batched
from fedexp.engine.dense import Dense
from fedexp.engine.loop import Loop
from fedexp.engine.quadratic import Quadratic
from fedexp.engine.select import Selected, select_engine
from fedexp.errors import EngineWarning
from fedexp.objective import (
    BatchedObjective,
    CopyableObjective,
    DenseObjective,
    DeviceObjective,
    LeastSquares,
    LoadableObjective,
    ModuleObjective,
    QuadraticObjective,
    StackedObjective,
)
from fedexp.tasks import Task
from tests.engine.helpers import Double, Toward, double_batch_norm, net, toward, unequal, work_of
from tests.helpers.problems import least_squares


def select(task: Task, name: str = "auto", local: fx.LocalTraining | None = None) -> Selected:
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)
    return select_engine(name, work_of(task, fx.fedavg(), local), state)  # type: ignore[arg-type]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_auto_takes_the_engine_that_suits() -> None:
    whole = fx.LocalTraining(lr=0.1, steps=9, batch_size=None)
    for task, kind, why in (
        (least_squares(), Quadratic, "auto: least squares on whole batches"),
        (unequal(mlp), Dense, "auto: a plain dense classifier on a CPU"),
        (unequal(), Batched, "auto: clients are trained together on cpu, every layer"),
        (toward(3, 4), Loop, "auto: no other engine is faster"),
    ):
        engine, reason, _ = select(task, local=whole if kind is Quadratic else None)
        assert type(engine) is kind
        assert reason.startswith(why)
        assert (kind is Loop) != reason.endswith("; it agrees with the loop on a few examples")


def test_a_named_engine_is_what_runs() -> None:
    assert select(unequal(mlp), "loop")[1] == "asked for by name"
    for name in ("loop", "threads", "batched", "dense"):
        chosen = select(unequal(mlp), name)
        assert chosen.choice.name == name
        assert chosen.reason.startswith("asked for by name")


def test_records_have_the_choice_and_its_reason() -> None:
    for engine, implementation in (("dense", None), ("batched", "layers"), ("loop", None)):
        first, last = fx.simulate(unequal(mlp), fx.fedexp(), 2, engine=engine)  # type: ignore[arg-type]
        choice = last.engine_choice
        assert choice is not None
        assert choice == first.engine_choice
        assert (choice.name, choice.implementation) == (engine, implementation)
        assert choice.cuda_graph is None
        assert last.engine == str(choice)
        assert json.loads(json.dumps(asdict(choice)))["reason"] == choice.reason
        assert not {"engine", "engine_choice"} & last.to_json().keys()
    assert str(EngineChoice("batched", "", "vmap, not padded")) == "batched (vmap, not padded)"


def test_objectives_declare_what_engines_may_ask_for() -> None:
    module, squares = ModuleObjective(nn.Linear(4, 3)), LeastSquares(torch.zeros(3))
    of_module: list[type] = [CopyableObjective, DenseObjective, LoadableObjective, StackedObjective]
    assert all(isinstance(module, kind) for kind in of_module)
    assert not any(isinstance(squares, kind) for kind in of_module)
    of_both: list[type] = [BatchedObjective, DeviceObjective]
    assert all(isinstance(each, kind) for kind in of_both for each in (module, squares))
    assert isinstance(squares, QuadraticObjective)
    assert not isinstance(module, QuadraticObjective)
    assert isinstance(Toward(3), BatchedObjective)
    assert not isinstance(Toward(3), DeviceObjective)
    with pytest.raises(fx.UsageError, match="cannot change devices; give it a method `on`"):
        toward(3, 4).to(torch.device("cpu"), "float32")


def test_auto_leaves_very_unequal_clients_to_the_loop() -> None:
    local = fx.LocalTraining(lr=0.1, steps=2, batch_size=None)
    assert isinstance(select(unequal(sizes=(10,) * 6), local=local).engine, Batched)
    assert isinstance(select(unequal(sizes=(10,) * 30 + (900,)), local=local).engine, Loop)


@dataclass(frozen=True)
class Halved(fx.ClientRule):
    """A correction that is not declared to be linear: it is batched by vmap."""

    def correct(
        self, grad: Tensor, params: Tensor, start: Tensor, broadcast: object, client_state: object
    ) -> Tensor:
        return grad / 2


def wide() -> nn.Module:
    return nn.Sequential(Double(), nn.Linear(4, 8000), nn.ReLU(), nn.Linear(8000, 3)).double()


@pytest.mark.parametrize(
    ("build", "sizes", "algorithm", "cohort", "expected"),
    [
        (net, (80,) * 20, "halved", None, "batched (vmap)"),
        (net, (80,) * 20, "halved", 4, "loop"),
        (net, (80,) * 20, "fedexp", 4, "batched (layers)"),
        (net, range(5, 262, 13), "halved", None, "batched (vmap)"),  # ten in a step
        (net, range(5, 262, 13), "halved", 8, "loop"),  # four
        (net, range(5, 262, 13), "fedexp", 8, "batched (layers)"),
        (net, range(5, 262, 13), "fedexp", 2, "loop"),
        (double_batch_norm, (80,) * 20, "fedexp", None, "batched (vmap, not padded)"),
        (double_batch_norm, range(12, 90, 11), "fedexp", None, "loop"),  # other last batches
        (wide, (80,) * 20, "fedexp", None, "batched (layers)"),
        (wide, range(5, 262, 13), "fedexp", None, "loop"),
    ],
)
def test_auto_batches_where_enough_clients_share_a_step_on_a_cpu(
    build: Callable[[], nn.Module],
    sizes: Sequence[int],
    algorithm: str,
    cohort: int | None,
    expected: str,
) -> None:
    task = unequal(build, tuple(sizes))
    rule = fx.fedexp() if algorithm == "fedexp" else fx.Algorithm(client=Halved())
    local = fx.LocalTraining(lr=0.01, epochs=1, batch_size=10)
    (record,) = fx.simulate(task, rule, 1, cohort, local=local)
    assert record.engine == expected


@pytest.mark.parametrize("cohort", [[0, 1, 2, 3, 4], [0, 1, 2, 3, 30]])
def test_the_engine_does_not_depend_on_who_is_in_the_first_cohort(cohort: list[int]) -> None:
    task = unequal(sizes=(10,) * 30 + (900,))
    local = fx.LocalTraining(lr=0.1, epochs=1, batch_size=10)
    (record,) = fx.simulate(task, fx.fedexp(), 1, cohort, local=local)
    assert record.engine == "loop"


def test_batching_pays_on_a_gpu_and_for_dense_layers() -> None:
    cpu, convolution = torch.device("cpu"), ModuleObjective(lambda: nn.Conv2d(1, 2, 3))
    assert ModuleObjective(lambda: nn.Linear(4, 3)).batching_pays(cpu)
    assert not convolution.batching_pays(cpu)
    assert convolution.batching_pays(torch.device("cuda"))


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_are_batched_on_a_gpu_only(layer: Callable[..., nn.Module]) -> None:
    objective = ModuleObjective(lambda: layer(3, 4))
    assert not objective.batching_pays(torch.device("cpu"))
    assert objective.batching_pays(torch.device("cuda"))


def test_large_sequence_models_are_not_batched_on_a_cpu() -> None:
    for words, pays in ((1_000, True), (10_000, False)):
        objective = ModuleObjective(partial(nn.Embedding, words, 16))
        assert objective.batching_pays(torch.device("cpu")) == pays
        assert objective.batching_pays(torch.device("cuda"))


class Stubborn(nn.Module):
    """Control flow on values: torch.func cannot batch it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if out.sum() > 0 else -out


def test_a_model_that_cannot_be_batched_takes_the_loop_and_the_reason_is_recorded() -> None:
    task = unequal(Stubborn)
    with pytest.warns(EngineWarning, match="one after another: .+"):
        records = list(fx.simulate(task, fx.fedavg(), 2))
    assert len(records) == 2
    choice = records[-1].engine_choice
    assert choice is not None
    assert choice.name == "loop"
    assert choice.reason.startswith("auto: no faster engine can be used: ")
    with pytest.raises(fx.UsageError, match="use engine='loop'"):
        list(fx.simulate(task, fx.fedavg(), 2, engine="batched"))
