"""Fingerprints: every change that gives other numbers is seen, and no change that gives none."""

from __future__ import annotations

import functools
import json
import logging
import random
import re
import subprocess
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.algorithms import Algorithm
from fedexp.experiment import Experiment
from fedexp.identity import BYTECODE, SOURCE, digest_of, is_library, same
from fedexp.objective import LeastSquares, ModuleObjective
from fedexp.runs import fingerprint as module
from fedexp.runs.fingerprint import Fingerprint, fingerprint, fingerprint_of_rules
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


def test_comments_layout_and_docstrings_are_no_code(tmp_path: Path) -> None:
    edited = STUDY.replace("# comment", "# another comment, longer\n\n").replace("Say.", "Say it.")
    assert edited != STUDY
    one, other = (
        fingerprint(task_of(imported(tmp_path, text)), fx.fedavg(), 0) for text in (STUDY, edited)
    )
    assert one.differences(other) == []
    # by source alone, as between two versions of Python
    for name, digest in one.digests.items():
        assert digest.get(SOURCE) == other.digests[name].get(SOURCE)


def test_two_pythons_compare_sources_and_one_compares_what_runs() -> None:
    assert same({SOURCE: "a", "cpython-1": "b"}, {SOURCE: "a", "cpython-2": "c"})
    assert not same({SOURCE: "a", "cpython-1": "b"}, {SOURCE: "x", "cpython-2": "b"})
    assert not same({SOURCE: "a", "cpython-1": "b"}, {SOURCE: "a", "cpython-1": "c"})
    assert not same({SOURCE: "a"}, {})
    assert digest_of(1).keys() == {SOURCE, BYTECODE}


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


def with_hook() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda module, inputs, output: output * 2)
    return linear


def with_forward() -> nn.Module:
    linear = nn.Linear(2, 2)
    vars(linear)["forward"] = lambda x: x
    return linear


def closed_over(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Hidden:
    def __init__(self, value: float) -> None:
        self._value = value


class HiddenLayer(nn.Module):
    """A layer with a private setting, and what its forward pass leaves."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale, self._calls = scale, 0
        self._seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return self._scaled(x)

    def _scaled(self, x: Tensor) -> Tensor:
        self._seen = x
        return self._scale * x


@dataclass
class Noted:
    value: int = 0


def with_attribute(value: float) -> Noted:
    noted = Noted()
    vars(noted)["note"] = value
    return noted


PAIRS: dict[str, tuple[Any, Any]] = {
    "slope of a layer": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    "layer": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "hook": (nn.Linear(2, 2), with_hook()),
    "replaced forward": (nn.Linear(2, 2), with_forward()),
    "closure": (closed_over(1.0), closed_over(2.0)),
    "argument of a partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "function of torch": (torch.relu, torch.sigmoid),
    "lambdas of one line": (lambda x: x, lambda x: -x),
    "default": (lambda x, k=1: x * k, lambda x, k=2: x * k),
    "constant that is text": (lambda: "a", lambda: "b"),
    "constant that is a set": (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    "nested function": (lambda: [-i for i in range(3)], lambda: [i * 2 for i in range(3)]),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "array": (np.zeros(2), np.zeros(2, dtype=np.float32)),
    "array of objects": (np.array(["a", None]), np.array(["b", None])),
    "empty array": (np.empty(0), np.empty((0, 2))),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "namespace": (Namespace(a=1), Namespace(a=2)),
    "transform of the package": (fx.data.Images((0.5,), (0.5,)), fx.data.Images((0.5,), (0.4,))),
    "mapping": ({"a": 1}, {"a": 2}),
    "cached function": (functools.cache(lambda: 1), functools.cache(lambda: 2)),
    "texts that join alike": (("ab", "c"), ("a", "bc")),
    "number and text": (1, "1"),
    "private attribute": (Hidden(1.0), Hidden(2.0)),
    "private attribute of a module": (HiddenLayer(1.0), HiddenLayer(2.0)),
    "attribute of a dataclass that is no field": (with_attribute(1.0), with_attribute(2.0)),
    "distribution": (torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.0, 2.0)),
    "series of pandas": (pd.Series({"a": 1.0}), pd.Series({"a": 2.0})),
    "labels of pandas": (pd.Series({"a": 1.0}), pd.Series({"b": 1.0})),
    "fraction": (Fraction(1, 3), Fraction(2, 3)),
    "range": (range(3), range(4)),
    "function in an object of a library": (deque([lambda x: x]), deque([lambda x: -x])),
    "function of numpy": (np.add, np.multiply),
    "pattern": (re.compile("a"), re.compile("b")),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_values_that_differ_have_digests_that_differ(pair: tuple[Any, Any]) -> None:
    one, other = pair
    assert not same(digest_of(one), digest_of(other))
    assert same(digest_of(one), digest_of(one))


def used_layer(layer: HiddenLayer) -> None:
    layer(torch.ones(3))


class Lazy:
    """An object with a value that is computed at first use."""

    @functools.cached_property
    def squares(self) -> list[int]:
        return [1, 4, 9]


USES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "forward pass": (HiddenLayer(1.0), used_layer),
    "cached property": (Lazy(), lambda value: value.squares),
    "generator of numpy": (np.random.default_rng(0), lambda value: value.normal()),
    "generator of torch": (torch.Generator(), lambda value: torch.rand(1, generator=value)),
    "generator of Python": (random.Random(0), lambda value: value.random()),
    "iterator": (iter([1, 2]), next),
    "distribution": (
        torch.distributions.Categorical(logits=torch.zeros(2)),
        lambda value: value.entropy(),
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_use_of_an_object_does_not_change_its_digest(
    use: tuple[Any, Callable[[Any], Any]],
) -> None:
    """A run could not be resumed in the process that was interrupted otherwise."""
    value, apply = use
    before = digest_of(value, whole=True)
    apply(value)
    assert same(digest_of(value, whole=True), before)


def test_what_holds_a_resource_counts_by_its_kind() -> None:
    """A writer of logs may have the time in the name of its file."""

    def logging_to(name: str) -> Any:
        handler = logging.StreamHandler()
        handler.name = name
        return handler

    assert same(digest_of(logging_to("a")), digest_of(logging_to("b")))


def test_values_in_modules_inside_modules_count(tmp_path: Path) -> None:
    package, settings = types.ModuleType("own_package"), types.ModuleType("own_package.settings")
    vars(package)["settings"], vars(settings)["own_package"] = settings, package
    study = imported(tmp_path, "def loss(o, y):\n    return own_package.settings.A * o\n")
    vars(study)["own_package"] = package
    vars(settings)["A"] = 1.0
    before = digest_of(study.loss)
    vars(settings)["B"] = 1.0  # not named
    assert digest_of(study.loss) == before
    vars(settings)["A"] = 2.0
    assert not same(digest_of(study.loss), before)


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


def test_a_model_given_as_an_instance_has_the_digest_that_0_2_0_stored() -> None:
    module = nn.Linear(3, 2)
    objective = ModuleObjective(module)
    stored = digest_of(functools.partial(deepcopy, module), deepcopy(module))
    assert same(digest_of(objective.build, objective.initial_module(0)), stored)


def test_a_logger_counts_by_its_kind_and_a_private_counter_not_at_all() -> None:
    def loss(log: logging.Logger) -> Callable[[], None]:
        return lambda: log.debug("")

    one, other = (loss(logging.getLogger(name)) for name in ("__main__", "study"))
    assert same(digest_of(one, whole=True), digest_of(other, whole=True))

    class Counting:
        def __init__(self, scale: float) -> None:
            self._scale, self._calls = scale, 0

        def evaluate(self) -> None:
            self._calls += 1

    first, second = Counting(1.0), Counting(1.0)
    second.evaluate()
    assert same(digest_of(first), digest_of(second))
    assert not same(digest_of(first), digest_of(Counting(2.0)))


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


def test_what_refers_to_itself_has_a_digest() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert same(digest_of(loop), digest_of(loop))

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert not same(digest_of(even), digest_of(odd))


def test_a_file_called_like_a_standard_module_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_library("statistics")
    study = imported(tmp_path, STUDY, name="statistics")
    edited = imported(tmp_path, STUDY.replace("torch.relu(", "F.gelu("), name="statistics")
    monkeypatch.setitem(sys.modules, "statistics", study)
    is_library.cache_clear()
    assert not same(digest_of(study.Net), digest_of(edited.Net))
    is_library.cache_clear()


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
    task, read = task_of(None, own), module._tensors

    def counted(named: Any) -> Any:
        reads.extend(value.data_ptr() for value in named.values())
        return read(named)

    monkeypatch.setattr(module, "_tensors", counted)
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
    task = Experiment("synthetic", options={"task.dim": 20}).problem
    assert isinstance(task.objective, LeastSquares)
    before = fingerprint(task, fx.fedavg(), 0)
    task.objective.gradient_scale = 2.0
    assert before.differences(fingerprint(task, fx.fedavg(), 0)) == ["the objective"]


def test_a_fingerprint_survives_json_and_knows_its_numerics() -> None:
    found = fingerprint_of_rules(fx.fedexp())
    again = Fingerprint.from_json(found.to_json())
    assert found.differences(again) == []
    older = Fingerprint(found.digests, numerics=1)
    assert older.differences(found) == ["the numerics version of fedexp (1 and 3)"]
    wrong: list[Any] = [{}, [], {"format": 9, "numerics": 3, "digests": {}}, None]
    for damaged in wrong:
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            Fingerprint.from_json(damaged)
