"""A simulated client on Flower gives the rounds of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

import fedexp as fx
from fedexp.engine.plan import sample_cohort
from fedexp.flower import central_evaluation, initial_arrays, simulated_train
from fedexp.flower.layout import Layout
from fedexp.flower.simulated_client import ParamOrder, from_arrays, to_arrays
from fedexp.objective import ModuleObjective
from fedexp.tasks import Task
from tests.flower.helpers.fake_grid import FakeGrid
from tests.flower.helpers.rounds import Rounds
from tests.flower.helpers.user_app import float64_task, simulated_app
from tests.helpers.problems import classes_task, dropout_net, least_squares

ALGORITHMS = [
    fx.fedexp(eps=1e-3),
    fx.fedexp_m(),
    fx.diloco(),
    fx.fedprox_exp(mu=0.3),
    fx.scaffold(),
]


class ConvNet(nn.Module):
    """A convolution, whose weights lie in another order in the engines, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.still = nn.Linear(4, 12).requires_grad_(False)
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = self.still(x).unflatten(1, (3, 2, 2))
        out: torch.Tensor = self.last(torch.relu(self.norm(self.conv(image))).flatten(1))
        return out


TASKS: dict[str, Callable[[], Task]] = {
    "BatchNorm": float64_task,
    "convolution": lambda: float64_task(ConvNet),
    "least squares": lambda: least_squares(clients=4),
    "dropout in float32": lambda: classes_task(dropout_net),
}


CASES = [(name, fx.scaffold_exp(), cohort) for name in TASKS for cohort in (None, 2)]


CASES += [("convolution", algorithm, 2) for algorithm in ALGORITHMS]


@pytest.mark.parametrize(("name", "algorithm", "cohort"), CASES)
def test_rounds_are_those_of_the_simulator(
    name: str, algorithm: fx.Algorithm, cohort: int | None
) -> None:
    task = TASKS[name]()
    rounds = Rounds(FakeGrid(simulated_app(task, 3), 4), algorithm, initial_arrays(task, 3))
    tight = 2e-6 if name.endswith("float32") else 1e-11
    records = fx.simulate(task, algorithm, rounds=4, cohort=cohort, seed=3, engine="loop")
    for record in records:
        metrics = rounds.run(sample_cohort(3, record.round, 4, cohort).tolist())
        params, buffers = from_arrays(task, rounds.server.model())
        assert metrics["server_lr"] == pytest.approx(record.server_lr, rel=10 * tight)
        torch.testing.assert_close(params, record.state.params, rtol=tight, atol=tight)
        torch.testing.assert_close(
            buffers.averaged, record.state.buffers.averaged, rtol=tight, atol=tight
        )
        assert torch.equal(buffers.kept, record.state.buffers.kept)


def test_local_training_of_the_callers_choice() -> None:
    task = float64_task()
    local = replace(task.local, lr=0.02, steps=None, epochs=2, weight_decay=0.1, clip_norm=0.5)
    local = replace(local, lr_decay=0.9, warmup_steps=5, step_schedule_over="run")
    app = ClientApp()
    app.train()(simulated_train(task, local, seed=1))
    rounds = Rounds(FakeGrid(app, 4), fx.scaffold_exp(), initial_arrays(task, 1))
    for record in fx.simulate(
        task, fx.scaffold_exp(), rounds=3, seed=1, local=local, engine="loop"
    ):
        rounds.run(range(4))
        params, _ = from_arrays(task, rounds.server.model())
        torch.testing.assert_close(params, record.state.params, rtol=1e-11, atol=1e-11)


def test_local_training_that_needs_the_simulator_is_refused() -> None:
    task, kept = float64_task(), fx.LocalTraining(momentum=0.9, keep_state=True)
    with pytest.raises(fx.UsageError, match=r"local\.keep_state needs the simulator"):
        simulated_train(task, kept)
    with pytest.raises(fx.UsageError, match=r"local\.keep_state needs the simulator"):
        simulated_train(replace(task, local=kept))
    app = ClientApp()
    over_run = fx.LocalTraining(step_schedule="cosine", step_schedule_over="run")
    app.train()(simulated_train(task, over_run))
    rounds = Rounds(FakeGrid(app, 4), fx.fedavg(), initial_arrays(task))
    with pytest.raises(AssertionError, match="'run' needs the number of rounds"):  # of the reply
        rounds.run(range(4))


@pytest.mark.parametrize("name", TASKS)
def test_arrays_and_back(name: str) -> None:
    task = TASKS[name]()
    params, buffers = task.objective.initial(5)
    arrays = to_arrays(task, params, buffers)
    again, others = from_arrays(task, arrays)
    assert torch.equal(params, again)
    assert torch.equal(buffers.averaged, others.averaged)
    assert torch.equal(buffers.kept, others.kept)
    layout = Layout.of(arrays)
    order, cpu = ParamOrder(task, layout), torch.device("cpu")
    assert torch.equal(order.gather({"v": layout.flat(arrays)}, cpu)["v"], params)
    assert torch.equal(order.gather(order.scatter({"v": params}), cpu)["v"], params)


@pytest.mark.parametrize("weighted", [False, True])
def test_evaluation_on_clients_and_at_the_server(weighted: bool) -> None:
    task = classes_task()
    if weighted:
        assert isinstance(task.objective, ModuleObjective)
        loss = nn.CrossEntropyLoss(torch.tensor([1.0, 4.0, 9.0]))
        objective = task.objective.with_loss(loss, classifies=True, per_example=False)
        task = replace(task, objective=objective)
    params, buffers = task.objective.initial(0)
    arrays = initial_arrays(task)
    central = central_evaluation(task)(1, arrays)
    assert dict(central) == pytest.approx(task.evaluate(params, buffers))
    grid = FakeGrid(simulated_app(task), 4)
    replies = grid.send_and_receive(
        Message(RecordDict({"arrays": arrays}), dst_node_id=n.node_id, message_type="evaluate")
        for n in grid.nodes
    )
    metrics = [reply.content.metric_records["metrics"] for reply in replies]
    assert sorted(int(str(m["num-examples"])) for m in metrics) == sorted(task.train.sizes)
    losses = [float(str(m["loss"])) for m in metrics]
    assert sum(losses) / 4 == pytest.approx(central["train_loss"])
    accuracies = task.evaluate_clients(params, buffers)["train_accuracy"].tolist()  # k / n
    assert sorted(float(str(m["accuracy"])) for m in metrics) == sorted(accuracies)


@pytest.mark.parametrize(
    ("config", "remedy"),
    [({}, "--node-config 'partition-id=0'"), ({"partition-id": 4}, "the clients 0 to 3")],
)
def test_a_node_must_know_which_client_it_is(config: dict[str, int], remedy: str) -> None:
    task = classes_task()
    rounds = Rounds(FakeGrid(simulated_app(task), [config]), fx.fedexp(), initial_arrays(task))
    with pytest.raises(AssertionError, match=remedy):
        rounds.run([0])


def test_another_model_from_the_server_is_refused() -> None:
    task = classes_task()
    rounds = Rounds(
        FakeGrid(simulated_app(task), 1), fx.fedexp(), ArrayRecord(nn.Linear(2, 2).state_dict())
    )
    with pytest.raises(AssertionError, match="initial_arrays of the same task"):
        rounds.run([0])
