"""`ModuleObjective`: inputs and outputs of any structure, losses of a batch, warm starts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.errors import UsageError
from fedexp.objective import Fields, ModuleObjective, StartableObjective, map_tensors
from fedexp.objective.base import as_type
from fedexp.tasks import classification


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Output:
    logits: Tensor
    name: str


def test_fields_become_arguments_and_targets() -> None:
    batch = {name: torch.tensor([k]) for k, name in enumerate("abcd")}
    positional = Fields(("a", "b"), "c")
    assert positional.arguments(batch) == ((batch["a"], batch["b"]), {})
    assert positional.targets(batch) is batch["c"]
    named = Fields({"left": "a"}, ("c", "d"))
    assert named.arguments(batch) == ((), {"left": batch["a"]})
    assert named.targets(batch) == (batch["c"], batch["d"])


def test_outputs_of_any_structure_are_cast() -> None:
    one = torch.ones(1)
    outputs = OrderedDict(a=[one, (one, "text")], b=Point(one, one), c=Output(one, "name"), d=None)
    wide: Any = as_type(outputs, torch.float64)
    assert type(wide) is OrderedDict
    assert wide["b"].x.dtype == wide["c"].logits.dtype == wide["a"][1][0].dtype == torch.float64
    assert (wide["a"][1][1], wide["c"].name, wide["d"]) == ("text", "name", None)
    assert outputs["c"].logits.dtype == torch.float32  # type: ignore[union-attr]
    assert as_type((torch.tensor([1]), one), torch.float64)[0].dtype == torch.int64
    added = map_tensors(torch.add, Point(one, one), Point(one, one))
    assert isinstance(added, Point)
    assert added.x.item() == 2


def test_a_loss_of_a_batch_is_not_padded() -> None:
    per_example = ModuleObjective(lambda: nn.Linear(2, 3))
    own = lambda outputs, targets: F.cross_entropy(outputs, targets)  # noqa: E731
    of_batch = ModuleObjective(lambda: nn.Linear(2, 3), own, per_example=False)
    assert not per_example.mixes_examples()
    assert of_batch.mixes_examples()
    assert of_batch.dense_network() is None
    params, buffers = of_batch.initial(0)
    batch = {"x": torch.randn(4, 2), "y": torch.tensor([0, 1, 2, 2])}
    first, second = (o.gradient(params.clone(), buffers, batch)[0] for o in (per_example, of_batch))
    torch.testing.assert_close(first, second)
    losses = of_batch.measure(params, buffers, batch)["loss"]
    assert losses.shape == (4,)
    assert losses.unique().numel() == 1
    wrong = ModuleObjective(lambda: nn.Linear(2, 3), per_example=False)
    with pytest.raises(UsageError, match="return one number"):
        wrong.gradient(params.clone(), buffers, batch)


def objective() -> ModuleObjective:
    return ModuleObjective(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))


def test_parameters_that_were_written_to_are_evaluated_anew() -> None:
    objective = ModuleObjective(lambda: nn.Linear(3, 2))
    params, buffers = objective.initial(0)
    batch = {"x": torch.eye(3), "y": torch.tensor([0, 1, 0])}
    objective.measure(params, buffers, batch)
    params.mul_(2)
    found, expected = (objective.measure(p, buffers, batch) for p in (params, params.clone()))
    assert torch.equal(found["loss"], expected["loss"])


def test_a_warm_start_is_the_initial_model_of_every_seed() -> None:
    first = objective()
    assert isinstance(first, StartableObjective)
    params, buffers = first.initial(7)
    buffers = buffers._replace(averaged=buffers.averaged + 1)
    warm = first.starting_at(params + 1, buffers)
    for seed in (0, 3):
        start, own = warm.initial(seed)
        assert torch.equal(start, params + 1)
        assert torch.equal(own.averaged, buffers.averaged)
        assert torch.equal(own.kept, buffers.kept)
    assert not torch.equal(first.initial(0)[0], params + 1)
    moved = warm.on(torch.device("cpu"), "float32").copy()
    assert torch.equal(moved.initial(1)[0], params + 1)
    weights = dict(warm.initial_module(0).named_parameters())  # what a fingerprint digests
    assert torch.equal(weights["0.bias"], first.load(params + 1, buffers).state_dict()["0.bias"])


class Centred(nn.Module):
    """Subtracts a running mean, which no state_dict has."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(dim=0)
        out: Tensor = self.linear(x - self.mean)
        return out


def test_a_model_that_is_changed_later_is_taken_as_it_was() -> None:
    model = nn.Linear(2, 2)
    objective = ModuleObjective(model)
    before = [objective.initial(seed)[0].clone() for seed in (0, 1)]
    with torch.no_grad():
        model.weight.zero_()
    for seed in (0, 1):
        assert torch.equal(objective.initial(seed)[0], before[seed])
        assert before[seed].norm() > 0
    built = torch.cat([p.detach().flatten() for p in objective.build().parameters()])
    assert torch.equal(built, before[0])


def test_a_warm_start_does_not_depend_on_earlier_calls() -> None:
    objective, given = ModuleObjective(Centred), Centred()
    given.mean += 1
    before = objective.starting_from(given.state_dict()).initial(0)
    batch = {"x": torch.ones(4, 3), "y": torch.zeros(4, dtype=torch.int64)}
    objective.gradient(*objective.initial(0), batch)  # leaves another mean in the module
    after = objective.starting_from(given.state_dict()).initial(0)
    assert after[1].averaged.tolist() == before[1].averaged.tolist() == [0, 0, 0]
    assert torch.equal(after[0], before[0])
    assert objective.starting_from(given).initial(0)[1].averaged.tolist() == [1, 1, 1]


def test_a_warm_start_from_a_module_takes_its_frozen_weights() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        return model

    other, first = build(), ModuleObjective(build)
    for weights in (other, other.state_dict()):
        warm = first.starting_from(weights)
        model = warm.copy().load(*warm.initial(5))
        for name, value in other.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)


def test_training_continues_from_a_warm_start() -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    train = Federation.from_ids({"x": x, "y": np.arange(40) % 3}, np.arange(40) % 4)
    task = classification("mine", lambda: nn.Linear(4, 3), train)
    assert isinstance(task.objective, ModuleObjective)
    end = list(fx.simulate(task, fx.fedavg(), rounds=5))[-1]
    params, buffers = end.state.output()
    warm = replace(task, objective=task.objective.starting_at(params, buffers))
    record = next(fx.simulate(warm, fx.fedexp(), rounds=2))
    assert record.train_loss is not None
    assert end.train_loss is not None
    assert record.train_loss < end.train_loss


def test_a_loaded_module_with_hooks_is_built_anew() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_forward_hook(lambda layer, args, out: out + 0 * model.weight.sum())
        return model

    hooked = ModuleObjective(build)
    params, buffers = hooked.initial(0)
    one, two = (hooked.load(params + k, buffers) for k in range(2))
    assert one is not two
    assert torch.equal(two.weight, one.weight + 1)  # type: ignore[operator, arg-type]


class Spectral(nn.Module):
    """Absolute values of Fourier features, by complex weights or by pairs of real ones."""

    def __init__(self, pairs: bool, bias: bool) -> None:
        super().__init__()
        weight = torch.randn(3, 4, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight) if pairs else weight)
        self.bias = nn.Parameter(torch.zeros(3)) if bias else 0.0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (torch.fft.fft(x) @ weight.T).abs() + self.bias


@pytest.mark.parametrize("bias", [True, False])
def test_complex_weights_are_refused_with_a_remedy_that_works(bias: bool) -> None:
    fields = {"x": torch.randn(8, 4), "y": torch.arange(8) % 3}
    train = Federation(fields, np.array([0, 4, 8]))
    with pytest.raises(UsageError, match=r"weight is complex.*call torch\.view_as_complex"):
        classification("spectral", lambda: Spectral(pairs=False, bias=bias), train)
    task = classification("spectral", lambda: Spectral(pairs=True, bias=bias), train)
    (record,) = fx.simulate(task, fx.fedexp(), 1)
    assert record.clients == 2


class Scores(nn.Module):
    """Class 0 for every token: [B, T, 4] to [B, 2, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        nn.init.zeros_(self.layer.weight)
        self.layer.bias.data = torch.tensor([9.0, 0.0])

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.layer(x).transpose(1, 2)
        return scores


def test_accuracies_over_tokens_are_not_rounded_to_the_type_of_the_model() -> None:
    labels = np.array([[0] * 7 + [1] * 3] * 20)  # 7 of 10 tokens are right
    fields = {"x": np.zeros((*labels.shape, 4), np.float32), "y": labels}
    train = Federation.from_ids(fields, np.arange(20) % 4)
    task = fx.supervised("tokens", Scores, train, fields)
    accuracy = task.evaluate(*task.objective.initial(0))["test_accuracy"]
    assert accuracy == 0.7
    assert accuracy >= 0.7
