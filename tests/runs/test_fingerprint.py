"""Fingerprints: every change that gives other numbers is seen, and no change that gives none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.algorithms import Algorithm
from fedexp.experiment import Experiment
from fedexp.identity import PYTHON, digest_of
from fedexp.objective import LeastSquares, ModuleObjective
from fedexp.runs import fingerprint as module
from fedexp.runs.fingerprint import (
    Fingerprint,
    fingerprint,
    fingerprint_of_object,
    fingerprint_of_rules,
)
from fedexp.tasks import Task
from tests.helpers.studies import STUDY, federation, imported, task_of

EDITS = {
    "forward": ("torch.relu(", "F.gelu("),
    "base class": ("return self.first(x)", "return -self.first(x)"),
    "helper": ("h.tanh()", "h.sin()"),
    "constant of the module": ("SLOPE = 0.5", "SLOPE = 0.25"),
    "constant in a mapping": ('"shift": 0.1', '"shift": 0.2'),
    "default": ("scale=1.0", "scale=2.0"),
    "static method": ("return h + 1", "return h + 2"),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edit_of_the_model_is_seen_though_no_weight_changes(
    edit: tuple[str, str], tmp_path: Path
) -> None:
    before = fingerprint(task_of(imported(tmp_path, STUDY)), fx.fedavg(), 0)
    after = fingerprint(task_of(imported(tmp_path, STUDY.replace(*edit))), fx.fedavg(), 0)
    assert before.differences(after) == ["the code or the layers of the model"]


OTHERS = {
    "the loss": ('reduction="none")', 'reduction="none") * 2'),
    "the transform": ("x - 1.0", "x - 2.0"),
    "the server rule": ("-self.lr", "self.lr"),
    "the client rule": ("grad * 2", "grad * 3"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_an_edit_of_a_loss_a_transform_or_a_rule_is_named(name: str, tmp_path: Path) -> None:
    found = []
    for text in (STUDY, STUDY.replace(*OTHERS[name])):
        study = imported(tmp_path, text)
        algorithm = Algorithm("own", study.Doubled(), study.Sign())
        found.append(fingerprint(task_of(study), algorithm, 0))
    assert found[0].differences(found[1]) == [name]


SCRIPT = """
import json, sys
from pathlib import Path
import fedexp as fx
from fedexp.runs.fingerprint import fingerprint
from tests.helpers.studies import STUDY, imported, task_of
study = imported(Path(sys.argv[1]), STUDY)
algorithm = fx.Algorithm("own", study.Doubled(), study.Sign())
print(json.dumps(fingerprint(task_of(study), algorithm, 3).to_json()))
"""


def test_the_same_content_has_the_same_fingerprint_in_another_process(tmp_path: Path) -> None:
    """Addresses and the order of sets differ there."""
    study = imported(tmp_path, STUDY)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    algorithm = Algorithm("own", study.Doubled(), study.Sign())
    assert json.loads(done.stdout) == fingerprint(task_of(study), algorithm, 3).to_json()


class Shrink(fx.ClientRule):
    """A rule with an attribute that is no field."""

    def __init__(self, by: float) -> None:
        self.by = by

    def correct(self, grad: Tensor, *others: Any) -> Tensor:
        return grad * self.by


@dataclass(frozen=True)
class Mapped(fx.ServerRule):
    """A rule with a field that is a function."""

    function: Callable[[float], float]
    lr: float = 1.0

    def step(self, params: Tensor, aggregate: Any, state: Any) -> Any:
        return params - self.function(self.lr) * aggregate.mean, state, {}


def test_values_of_rules_count_and_those_in_the_spec_by_their_value() -> None:
    plain, changed = lambda x: x, lambda x: -x
    one = fingerprint_of_rules(Algorithm("own", Shrink(1.0), Mapped(plain)))
    for client, server, names in (
        (Shrink(1.0), Mapped(plain, lr=1), []),  # the spec has the number, where 1 is 1.0
        (Shrink(2.0), Mapped(plain), ["the client rule"]),
        (Shrink(1.0), Mapped(changed), ["the server rule"]),
    ):
        other = fingerprint_of_rules(Algorithm("own", client, server))
        assert one.differences(other) == names


def test_rules_of_the_package_are_named_by_an_algorithm_that_has_them() -> None:
    """Their classes may be renamed; equal fields are not enough."""
    adam = fingerprint_of_rules(fx.fedadam())
    assert adam.differences(fingerprint_of_rules(fx.fedyogi())) == ["the server rule"]
    assert fingerprint_of_rules(fx.fedavg()).differences(fingerprint_of_rules(fx.fedprox())) == [
        "the client rule"
    ]
    kind = fx.server.Adam
    names = kind.__qualname__, kind.__module__
    kind.__qualname__, kind.__module__ = "Renamed", "fedexp.elsewhere"
    try:
        assert adam.differences(fingerprint_of_rules(fx.fedadam())) == []
    finally:
        kind.__qualname__, kind.__module__ = names


def test_objects_of_a_worker_differ_by_rules_and_by_their_values() -> None:
    one, other = (
        Algorithm("own", server=fx.server.Adam()),
        Algorithm("own", server=fx.server.Yogi()),
    )
    before = fingerprint_of_object(one)
    assert before.differences(fingerprint_of_object(one)) == []
    assert before.differences(fingerprint_of_object(other)) == ["the server rule"]
    changed = Algorithm("own", server=fx.server.Adam(lr=0.5))
    assert before.differences(fingerprint_of_object(changed)) == ["the object"]
    task = task_of(None)
    assert fingerprint_of_object(task).differences(fingerprint_of_object(changed_at(3))) == [
        "the training data (x)"
    ]


class Scaled:
    """A loss whose factor is private."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self._factor * F.cross_entropy(outputs, targets)


class Slotted:
    """A metric whose threshold is in a slot."""

    __slots__ = ("threshold",)

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - self.threshold).relu().mean()


def weighted(weight: float) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, weight]))


def calling(loss: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    return lambda outputs, targets: loss(outputs, targets)


LOSSES: dict[str, Callable[[float], Any]] = {
    "weights of classes": weighted,
    "weights of classes in a closure": lambda value: calling(weighted(value)),
    "private attribute": Scaled,
    "slot": Slotted,
}


@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("what", ["loss", "metrics"])
@pytest.mark.filterwarnings("ignore:.*classes have weights")
def test_all_values_of_a_loss_and_of_a_metric_count(
    what: str, make: Callable[[float], Any]
) -> None:
    def found(value: float) -> Fingerprint:
        given = {"loss": make(value)} if what == "loss" else {"metrics": {"own": make(value)}}
        task = fx.supervised("own", lambda: nn.Linear(3, 2), federation(), **given)
        return fingerprint(task, fx.fedavg(), 0)

    assert found(0.5).differences(found(0.5)) == []
    assert found(0.5).differences(found(0.25)) == [f"the {what}"]


def test_what_decides_which_values_are_recorded_counts() -> None:
    def found(goal: str | None = None, stops: bool = True, by_client: bool = False) -> Fingerprint:
        task = fx.supervised(
            "own", lambda: nn.Linear(3, 2), federation(), goal=goal, by_client=by_client
        )
        return fingerprint(task, fx.fedavg(), 0, stops=stops)

    assert found().differences(found(by_client=True)) == ["the evaluation of every client"]
    goals = "max:train_accuracy", "min:train_loss"
    assert found(goals[0]).differences(found(goals[1])) == ["the goal"]
    assert found(goals[0], stops=False).differences(found(goals[1], stops=False)) == []


@pytest.fixture
def least_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if more than 480 bytes could not be read whole: all but the training images can."""
    monkeypatch.setattr(module, "WHOLE_BYTES", 480)


def changed_at(row: int, field: str = "x", test: bool = False) -> Task:
    task = task_of(None)
    tensors = task.test if test else task.train.fields
    assert tensors is not None
    tensors[field][row] += 1
    return task


def test_all_data_count_up_to_the_last_byte() -> None:
    plain = fingerprint(task_of(None), fx.fedavg(), 0)
    for row in (0, 17, 39):
        found = fingerprint(changed_at(row), fx.fedavg(), 0)
        assert plain.differences(found) == ["the training data (x)"]
    y = fingerprint(changed_at(5, "y"), fx.fedavg(), 0)
    assert plain.differences(y) == ["the training data (y)"]
    tested = fingerprint(changed_at(3, test=True), fx.fedavg(), 0)
    assert plain.differences(tested) == ["the test data (x)"]
    shared = fingerprint(task_of(None, federation([5, 35])), fx.fedavg(), 0)
    assert plain.differences(shared) == ["the clients' shares of the data"]
    seed = fingerprint(task_of(None), fx.fedavg(), 1)
    assert plain.differences(seed) == ["the initial weights"]


@pytest.mark.usefixtures("least_bytes")
def test_of_large_data_every_client_and_every_label_counts() -> None:
    plain = fingerprint(task_of(None), fx.fedavg(), 0)
    for row in (0, 9, 10, 39):  # the ends of both clients
        found = fingerprint(changed_at(row), fx.fedavg(), 0)
        assert plain.differences(found) == ["the training data (x)"]
    for row in range(40):
        found = fingerprint(changed_at(row, "y"), fx.fedavg(), 0)
        assert plain.differences(found) == ["the training data (y)"]
    assert plain.differences(fingerprint(changed_at(12), fx.fedavg(), 0)) == []  # not sampled


def test_data_are_read_once_for_many_runs_and_again_once_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, reads = federation(), list[int]()
    own = fx.Federation({n: v.clone() for n, v in shared.fields.items()}, shared.offsets)
    task = task_of(None, own)

    def counted(value: Any, *more: Any, **options: Any) -> str:
        if isinstance(value, Tensor):
            reads.append(value.data_ptr())
        return digest_of(value, *more, **options)

    monkeypatch.setattr(module, "digest_of", counted)
    one, other = fingerprint(task, fx.fedavg(), 0), fingerprint(task, fx.fedexp(), 1)
    assert reads.count(task.train.fields["x"].data_ptr()) == 1
    assert one.differences(other) == ["the initial weights", "the server rule"]
    task.train.fields["x"][0] += 1
    assert "the training data (x)" in one.differences(fingerprint(task, fx.fedavg(), 0))


def test_data_that_numpy_changes_are_read_again() -> None:
    """The version of a tensor does not count what is written to the array that it shares."""
    task = task_of(None)
    assert task.test is not None
    before = fingerprint(task, fx.fedavg(), 0)
    task.test["y"].numpy()[:] += 1
    task.train.fields["x"].numpy()[:] += 1
    after = fingerprint(task, fx.fedavg(), 0)
    assert sorted(before.differences(after)) == ["the test data (y)", "the training data (x)"]


def test_weights_and_buffers_of_a_given_model_count() -> None:
    def found(change: Callable[[Any], Any]) -> Fingerprint:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model[0].bias.requires_grad_(False)
        change(model)
        return fingerprint(task_of(None, build=model), fx.fedavg(), 0)

    plain = found(lambda model: None)
    assert plain.differences(found(lambda model: None)) == []
    frozen = found(lambda model: model[0].bias.data.add_(1))
    assert plain.differences(frozen) == ["the initial weights"]
    buffer = found(lambda model: model[1].running_mean.add_(1))
    assert plain.differences(buffer) == ["the initial buffers"]
    momentum = found(lambda model: setattr(model[1], "momentum", 0.5))
    assert plain.differences(momentum) == ["the code or the layers of the model"]


def test_private_attributes_of_layers_of_torch_are_not_settings() -> None:
    """A recurrent layer has its weights in one, which depend on the seed."""

    class Recurrent(nn.LSTM):
        pass

    task = task_of(None, build=lambda: Recurrent(3, 2))
    one, other = (fingerprint(task, fx.fedavg(), seed) for seed in (0, 1))
    assert one.differences(other) == ["the initial weights"]


def test_training_does_not_change_a_fingerprint() -> None:
    """A model that leaves an attribute behind is still the same model."""

    class Leaving(nn.Linear):
        rows = 0

        def forward(self, x: Tensor) -> Tensor:
            self.rows = len(x)
            return super().forward(x)

    task = task_of(None, build=lambda: Leaving(3, 2))
    before = fingerprint(task, fx.fedavg(), 0)
    list(fx.simulate(task, fx.fedavg(), rounds=1, cohort=2, engine="loop"))
    assert isinstance(task.objective, ModuleObjective)
    assert before.differences(fingerprint(task, fx.fedavg(), 0)) == []


def test_objectives_that_are_no_modules_count_with_their_settings() -> None:
    task = Experiment("synthetic", "fedavg", options={"task.dim": "20"}).problem
    assert isinstance(task.objective, LeastSquares)
    before = fingerprint(task, fx.fedavg(), 0)
    task.objective.gradient_scale = 2.0
    assert before.differences(fingerprint(task, fx.fedavg(), 0)) == ["the objective"]


def test_a_fingerprint_survives_json_and_knows_its_numerics() -> None:
    found = fingerprint_of_rules(fx.fedexp())
    again = Fingerprint.from_json(found.to_json())
    assert found.differences(again) == []
    older = Fingerprint(found.digests, numerics=1)
    assert older.differences(found) == ["the numerics version of fedexp (1 and 4)"]
    wrong: list[Any] = [{}, [], {"format": 9, "numerics": 4, "digests": {}}, None]
    for damaged in wrong:
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            Fingerprint.from_json(damaged)


def test_code_that_another_python_compiled_is_refused_by_the_name_of_the_cause() -> None:
    one = fingerprint(task_of(None), Algorithm("own", server=Mapped(lambda x: x)), 0)
    text = json.dumps(one.to_json()).replace(PYTHON, "cpython-399")
    apart = Fingerprint.from_json(json.loads(text)).differences(one)
    assert "the server rule" in apart
    assert apart[-1] == f"the version of Python that compiles your code (cpython-399 and {PYTHON})"
    plain = fingerprint_of_rules(fx.fedexp())
    assert PYTHON not in json.dumps(plain.to_json())


def test_a_fingerprint_of_an_earlier_edition_can_be_read() -> None:
    digests = {
        "the server rule": {"source": "ab", "cpython-311": "cd"},
        "the loss": {"content": ""},
    }
    stored = Fingerprint.from_json({"format": 1, "numerics": 3, "digests": digests})
    assert stored.differences(stored) == []
    apart = stored.differences(fingerprint_of_rules(fx.fedexp()))
    assert apart[-1] == "the numerics version of fedexp (3 and 4)"
