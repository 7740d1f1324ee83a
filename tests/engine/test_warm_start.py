"""Warm starts from records, modules and state_dicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.objective import ModuleObjective
from fedexp.runs.fingerprint import fingerprint
from fedexp.tasks import Task
from tests.engine.helpers import small_resnet
from tests.helpers.problems import BatchNormNet, Net, classes_task, least_squares


def trained(task: Task) -> fx.Record:
    *_, record = fx.simulate(task, fx.scaffold_exp(), 3, 2, seed=5)
    return record


def module_of(task: Task, record: fx.Record) -> nn.Module:
    module: nn.Module = task.objective.load(*record.state.output())  # type: ignore[attr-defined]
    return module


class Tied(nn.Module):
    """Two layers with one weight, a frozen layer, and a buffer that no state_dict has."""

    scale: Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            nn.init.normal_(self.frozen.weight)
            nn.init.zeros_(self.frozen.bias)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.frozen(self.second(self.first(x).tanh()) * self.scale))
        return out


@pytest.mark.parametrize("build", [BatchNormNet, Net, Tied], ids=lambda b: b.__name__)
@pytest.mark.parametrize("kind", ["record", "module", "state_dict"])
def test_a_run_starts_at_given_weights_with_fresh_states(build: Any, kind: str) -> None:
    """At round 0, from the output model; the states of server and clients are new."""
    task = classes_task(build)
    record = trained(task)
    module = module_of(task, record)
    kinds: dict[str, Any] = {
        "record": record,
        "module": module,
        "state_dict": module.state_dict(),
    }
    runs = list(fx.simulate(task, fx.fedexp_m(), 2, 2, start=kinds[kind], engine="loop"))
    assert [r.round for r in runs] == [1, 2]
    assert not runs[-1].state.clients
    params, buffers = record.state.output()
    begin = fx.SimulationState.of(params, buffers, fx.fedexp_m())
    expected = list(fx.simulate(task, fx.fedexp_m(), 2, 2, start=begin, engine="loop"))
    assert torch.equal(runs[-1].state.params, expected[-1].state.params)
    assert torch.equal(runs[-1].state.buffers.averaged, expected[-1].state.buffers.averaged)
    assert torch.equal(runs[-1].state.buffers.kept, expected[-1].state.buffers.kept)


class Untied(Tied):
    """The same layers, with a weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = nn.Parameter(torch.zeros(4, 4))


def test_separate_weights_start_from_tied_ones() -> None:
    """A module has both names of a tied weight, as its state_dict has."""
    tied = Tied()
    for start in (tied, tied.state_dict()):
        (record,) = fx.simulate(classes_task(Untied), fx.fedavg(), 1, 2, start=start)
        weights = record.model().state_dict()
        assert not torch.equal(weights["first.weight"], weights["second.weight"])
        change = weights["second.weight"] - tied.first.weight
        assert change.norm() < 0.5 * tied.first.weight.norm()


def test_a_state_still_continues() -> None:
    task = classes_task()
    whole = list(fx.simulate(task, fx.scaffold(), 4, 2))
    (last,) = fx.simulate(task, fx.scaffold(), 4, 2, start=whole[2].state)
    assert torch.equal(last.state.params, whole[3].state.params)


def test_other_types_and_convolutions() -> None:
    task = classes_task(Net)
    double = {name: value.double() for name, value in Net().state_dict().items()}
    (record,) = fx.simulate(task, fx.fedavg(), 1, start=double)
    assert record.state.params.dtype == torch.float32
    objective = ModuleObjective(small_resnet)
    params, buffers = objective.initial(7)
    again = objective.starting_at(params, buffers)
    assert torch.equal(again.initial(0)[0], params)
    assert torch.equal(objective.initial(7)[0], params)  # which is not changed


def test_least_squares_start_from_records() -> None:
    task = least_squares()
    record = trained(task)
    (first,) = fx.simulate(task, fx.fedavg(lr=1e-9), 1, start=record)
    torch.testing.assert_close(first.state.params, record.state.output()[0], rtol=1e-6, atol=0)
    with pytest.raises(fx.UsageError, match="does not train a torch module; start from"):
        fx.simulate(task, fx.fedavg(), 1, start=nn.Linear(2, 2))


def test_fingerprints_cover_the_weights() -> None:
    task = classes_task(Net)
    start = task.objective.starting_at(*trained(task).state.output())  # type: ignore[attr-defined]
    one, other = (fingerprint(t, fx.fedavg(), 0) for t in (task, replace(task, objective=start)))
    assert one.differences(other)


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda state: {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.0.bias"), r"start has no layers\.0\.bias, which the task's model has"),
        (lambda s: {**s, "extra": s["layers.0.bias"]}, "start has extra, which .* leave it out"),
        (
            lambda s: {**s, "layers.0.bias": torch.zeros(9)},
            r"layers\.0\.bias of start has shape \[9\] where the task's model has \[6\]",
        ),
        (lambda s: {"model": s}, "model of start is .*, not a tensor; pass a state_dict"),
        (lambda s: "model.pt", "there are no weights in model.pt; give a finished run"),
        (lambda s: BatchNormNet(), r"start has no layers\.0\.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: Callable[..., Any], message: str) -> None:
    task = classes_task(Net)
    with pytest.raises(fx.UsageError, match=message):
        fx.simulate(task, fx.fedavg(), 1, start=change(Net().state_dict()))


def test_a_record_of_another_model_is_refused() -> None:
    record = trained(classes_task(BatchNormNet))
    with pytest.raises(fx.UsageError, match=r"63 values of parameters where .* has 51; start from"):
        fx.simulate(classes_task(Net), fx.fedavg(), 1, start=record)


def test_frozen_weights_of_a_record_are_those_that_it_was_trained_with() -> None:
    task, start = classes_task(Tied), Tied(seed=1)
    *_, first = fx.simulate(task, fx.fedavg(), 2, start=start)
    (second,) = fx.simulate(task, fx.fedexp(), 1, start=first)
    found = dict(second.model().named_parameters())
    assert torch.equal(found["frozen.weight"], start.frozen.weight)
    (same,) = fx.simulate(task, fx.fedexp(), 1, start=first.model())
    assert torch.equal(second.state.params, same.state.params)


def test_frozen_weights_are_those_of_the_start() -> None:
    start = Tied(seed=1)
    (record,) = fx.simulate(classes_task(Tied), fx.fedavg(), 1, start=start)
    found = dict(record.model().named_parameters())
    assert torch.equal(found["frozen.weight"], start.frozen.weight)
    assert not torch.equal(found["last.weight"], start.last.weight)
