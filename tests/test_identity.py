"""Which values are the same: for a digest, which is stored, and for a key, within a process.

Every pair of `DIFFERENT` differs by both; a pair of `SAME` is one value to a digest, and to a key
where its code is the same object. What a digest leaves out is what `USES` changes.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import random
import re
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.identity import PYTHON, digest_of, key_of, origin
from fedexp.models import CharLSTM
from fedexp.objective import ModuleObjective
from tests.helpers.studies import STUDY, imported


def with_hook(factor: float) -> nn.Module:
    linear = nn.Linear(2, 2, bias=False)
    nn.init.ones_(linear.weight)
    linear.register_forward_hook(lambda module, inputs, output: output * factor)
    return linear


def with_forward() -> nn.Module:
    linear = with_hook(1.0)
    vars(linear)["forward"] = lambda x: x
    return linear


def closed_over(factor: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Hidden:
    def __init__(self, value: Any) -> None:
        self._value = value

    def doubled(self) -> Any:
        return 2 * self._value


class Slotted:
    __slots__ = ("__dict__", "__value")

    def __init__(self, value: float) -> None:
        self.__value = value


class HiddenLayer(nn.Module):
    """A layer with private settings, one of them of a method, and what its forward pass leaves."""

    def __init__(self, scale: float, shift: float = 0.0) -> None:
        super().__init__()
        self._scale, self._calls = scale, 0
        self._seen: Tensor | None = None
        self.setup(shift)

    def setup(self, shift: float) -> None:
        self._shift = shift

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        return self._scaled(x)

    def _scaled(self, x: Tensor) -> Tensor:
        self._seen = x
        return self._scale * x + self._shift


class Counting:
    def __init__(self, scale: float) -> None:
        self._scale, self._calls = scale, 0

    def evaluate(self) -> None:
        self._calls += 1


class Lazy:
    """An object with a value that is computed at first use."""

    @functools.cached_property
    def squares(self) -> list[int]:
        return [1, 4, 9]


@dataclass
class Noted:
    value: int = 0


def with_attribute(value: float) -> Noted:
    noted = Noted()
    vars(noted)["note"] = value
    return noted


def function_with(**attributes: Any) -> Callable[[], Any]:
    def function() -> Any:
        return function.scale  # type: ignore[attr-defined]

    vars(function).update(attributes)
    return function


def class_with(**attributes: Any) -> Any:
    return type("Own", (), attributes)()


class Listed(list[int]):
    """A list with an attribute."""

    def __init__(self, *values: int, scale: float = 1.0) -> None:
        super().__init__(values)
        self.scale = scale


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "slope of a layer": (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
    "layer": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
    "layer of the package": (fx.models.GroupNormReLU(2, 4), nn.GroupNorm(2, 4)),
    "dropout": (nn.Dropout(0.1), nn.Dropout(0.2)),
    "frozen weight": (nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)),
    "hook": (nn.Linear(2, 2, bias=False), with_hook(1.0)),
    "closure of a hook": (with_hook(1.0), with_hook(2.0)),
    "replaced forward": (with_hook(1.0), with_forward()),
    "private attribute of a module": (HiddenLayer(1.0), HiddenLayer(2.0)),
    "private attribute that a constructor's method sets": (HiddenLayer(1, 1), HiddenLayer(1, 2)),
    "closure": (closed_over(1.0), closed_over(2.0)),
    "type of a number": (closed_over(1.0), closed_over(1)),
    "sign of zero": (closed_over(0.0), closed_over(-0.0)),
    "partial": (functools.partial(pow), pow),
    "argument of a partial": (functools.partial(pow, 2), functools.partial(pow, 3)),
    "keyword of a partial": (functools.partial(int, base=2), functools.partial(int, base=8)),
    "object of a method": (Hidden(1.0).doubled, Hidden(2.0).doubled),
    "function of torch": (torch.relu, torch.sigmoid),
    "function of the package": (fx.models.logistic, fx.models.mlp),
    "function of numpy": (np.add, np.multiply),
    "builtin function": (len, sum),
    "method of a type": (str.upper, str.lower),
    "lambdas of one line": (lambda x: x, lambda x: -x),
    "default": (lambda x, k=1: x * k, lambda x, k=2: x * k),
    "default of a keyword": (lambda x, *, k=1: x * k, lambda x, *, k=2: x * k),
    "several arguments": (lambda x: x, lambda *x: x),
    "constant that is text": (lambda: "a", lambda: "b"),
    "constant that is a set": (lambda x: x in {1, 2}, lambda x: x in {1, 3}),
    "nested function": (lambda: [-i for i in range(3)], lambda: [i * 2 for i in range(3)]),
    "attribute of a function": (function_with(scale=1.0), function_with(scale=2.0)),
    "cached function": (functools.cache(lambda: 1), functools.cache(lambda: 2)),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "type of a tensor": (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "sparse tensor": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "array": (np.zeros(2), np.zeros(2, dtype=np.float32)),
    "last number of an array": (np.zeros(3), np.array([0.0, 0.0, 1.0])),
    "array of objects": (np.array(["a", None]), np.array(["b", None])),
    "empty array": (np.empty(0), np.empty((0, 2))),
    "number of numpy": (np.float32(1), np.float32(2)),
    "namespace": (Namespace(a=1), Namespace(a=2)),
    "transform of the package": (fx.data.Images((0.5,), (0.5,)), fx.data.Images((0.5,), (0.4,))),
    "value of a mapping": ({"a": 1}, {"a": 2}),
    "key of a mapping": ({1: 0}, {"1": 0}),
    "set": ({"a", "b"}, {"a", "c"}),
    "texts that join alike": (("ab", "c"), ("a", "bc")),
    "number and text": (1, "1"),
    "list and tuple": ([1], (1,)),
    "item of a subclass of a list": (Listed(1), Listed(2)),
    "attribute of a subclass of a list": (Listed(1), Listed(1, scale=2.0)),
    "enum": (Kind.ONE, Kind.TWO),
    "private attribute": (Hidden(1.0), Hidden(2.0)),
    "slot": (Slotted(1.0), Slotted(2.0)),
    "object in an object": (Hidden([Hidden(1)]), Hidden([Hidden(2)])),
    "one object twice": ([Hidden(1), Hidden(1)], [Hidden(1)] * 2),
    "attribute of a dataclass that is no field": (with_attribute(1.0), with_attribute(2.0)),
    "attribute of a class": (class_with(scale=1.0), class_with(scale=2.0)),
    "method of a class": (class_with(f=lambda self: 1), class_with(f=lambda self: 2)),
    "property of a class": (
        class_with(f=property(lambda self: 1)),
        class_with(f=property(lambda self: 2)),
    ),
    "static method": (
        class_with(f=staticmethod(lambda: 1)),
        class_with(f=staticmethod(lambda: 2)),
    ),
    "distribution": (torch.distributions.Normal(0.0, 1.0), torch.distributions.Normal(0.0, 2.0)),
    "series of pandas": (pd.Series({"a": 1.0}), pd.Series({"a": 2.0})),
    "labels of pandas": (pd.Series({"a": 1.0}), pd.Series({"b": 1.0})),
    "fraction": (Fraction(1, 3), Fraction(2, 3)),
    "length of a queue": (deque([1], maxlen=2), deque([1], maxlen=3)),
    "default of a mapping": (collections.defaultdict(int), collections.defaultdict(list)),
    "mask of an array": (np.ma.array([1], mask=[False]), np.ma.array([1], mask=[True])),
    "expanded tensor": (torch.tensor(1.0).expand(1), torch.tensor(2.0).expand(1)),
    "computed tensor in an object of a library": (
        torch.distributions.Normal(torch.ones(2, requires_grad=True) * 2, 1.0),
        torch.distributions.Normal(torch.ones(2, requires_grad=True) * 3, 1.0),
    ),
    "range": (range(3), range(4)),
    "function in an object of a library": (deque([lambda x: x]), deque([lambda x: -x])),
    "object of a library": (collections.UserDict(a=1), collections.UserDict(a=2)),
    "pattern": (re.compile("a"), re.compile("b")),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
@pytest.mark.parametrize("whole", [False, True])
def test_values_that_differ(pair: tuple[Any, Any], whole: bool) -> None:
    one, other = pair
    assert digest_of(one, whole=whole) != digest_of(other, whole=whole)
    assert digest_of(one, whole=whole) == digest_of(one, whole=whole)
    assert key_of(one) != key_of(other)
    assert key_of(one) == key_of(one)


GLOBAL = 1.0
CONFIG = types.SimpleNamespace(scale=1.0, folder="runs")


def called() -> float:
    return GLOBAL


class Reading:
    """Refers to globals by itself, through a function, and in a nested one."""

    def scaled(self) -> float:
        return called() * CONFIG.scale


class ReadingLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * called()


@pytest.mark.parametrize("value", [called, Reading(), ReadingLayer(), lambda: Reading().scaled()])
def test_globals_count_where_they_are_read(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, key = digest_of(value), key_of(value)
    monkeypatch.setattr(CONFIG, "folder", "elsewhere")
    assert digest_of(value) == before
    assert key_of(value) == key or isinstance(value, Reading)  # which equals itself alone
    monkeypatch.setitem(globals(), "GLOBAL", 2.0)
    assert digest_of(value) != before
    assert key_of(value) != key or isinstance(value, Reading)


def test_values_in_modules_inside_modules_count(tmp_path: Path) -> None:
    package, settings = types.ModuleType("own_package"), types.ModuleType("own_package.settings")
    vars(package)["settings"], vars(settings)["own_package"] = settings, package
    study = imported(tmp_path, "def loss(o, y):\n    return own_package.settings.A * o\n")
    vars(study)["own_package"] = package
    vars(settings)["A"] = 1.0
    before = digest_of(study.loss), key_of(study.loss)
    vars(settings)["B"] = 1.0  # not named
    assert (digest_of(study.loss), key_of(study.loss)) == before
    vars(settings)["A"] = 2.0
    assert digest_of(study.loss) != before[0]
    assert key_of(study.loss) != before[1]


def logging_to(name: str) -> Callable[[], None]:
    log, handler = logging.getLogger(name), logging.StreamHandler()
    handler.name = name
    return lambda: log.debug(handler)


def renamed(kind: Any) -> Any:
    """Return a class of the package after it was renamed and moved."""
    inside = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    other = type("Renamed", kind.__bases__, inside)
    other.__module__, other.__qualname__ = "fedexp.elsewhere", "Renamed"
    return other


def moved(instance: Any) -> Any:
    other = object.__new__(renamed(type(instance)))
    other.__dict__.update(vars(instance))
    return other


LSTM = CharLSTM(9, 4, 5, 1)
SAME: dict[str, tuple[Any, Any]] = {
    "closure": (closed_over(1.0), closed_over(1.0)),
    "weights of layers": (nn.Linear(3, 2), nn.Linear(3, 2)),
    "weights of recurrent layers": (nn.LSTM(3, 2), nn.LSTM(3, 2)),
    "mode of a module": (nn.Dropout(0.5), nn.Dropout(0.5).eval()),
    "order of a set": ({"a", "b", "c"}, set("cba")),
    "code": (lambda x: x + 1, lambda x: x + 1),
    "settings of a module": (HiddenLayer(1.0), HiddenLayer(1.0)),
    "what names the time": (logging_to("a"), logging_to("b")),
    "class of the package": (fx.models.CharLSTM, renamed(fx.models.CharLSTM)),
    "layers of the package": (LSTM, moved(LSTM)),
    "dataclass of the package": (
        fx.data.Images((0.5,), (0.5,)),
        moved(fx.data.Images((0.5,), (0.5,))),
    ),
    "method of the package": (
        fx.data.Images((0.5,), (0.5,)).evaluate,
        moved(fx.data.Images((0.5,), (0.5,))).evaluate,
    ),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_values_that_are_the_same_to_a_digest(pair: tuple[Any, Any]) -> None:
    assert digest_of(pair[0]) == digest_of(pair[1])


def used_layer(layer: HiddenLayer) -> None:
    layer(torch.ones(3))


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
    assert digest_of(value, whole=True) == before


def test_a_private_counter_counts_in_what_is_digested_as_a_whole_alone() -> None:
    one, other = Counting(1.0), Counting(1.0)
    other.evaluate()
    assert digest_of(one) == digest_of(other) != digest_of(Counting(2.0))
    assert digest_of(one, whole=True) != digest_of(other, whole=True)


def test_weights_of_modules_count_in_what_is_digested_as_a_whole_alone() -> None:
    def digests(value: float) -> tuple[str, str]:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, value]))
        return digest_of(loss), digest_of([loss], whole=True)

    assert digests(1.0)[0] == digests(2.0)[0]
    assert digests(1.0)[1] != digests(2.0)[1]


def test_numbers_of_large_arrays_count_up_to_the_last() -> None:
    """They are hashed in blocks."""
    large = np.zeros(2**24 + 9, dtype=np.uint8)
    before = digest_of(large)
    for at in (0, 2**24 - 1, 2**24, -1):
        large[at] = 1
        assert digest_of(large) != before
        large[at] = 0
    assert digest_of(large) == before


def test_what_refers_to_itself_has_a_digest() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert digest_of(loop) == digest_of(loop)

    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    assert digest_of(even) != digest_of(odd)


def test_comments_layout_and_docstrings_are_no_code(tmp_path: Path) -> None:
    edited = STUDY.replace("# comment", "# another comment, longer\n\n").replace("Say.", "Say it.")
    assert edited != STUDY
    one, other = (imported(tmp_path, text) for text in (STUDY, edited))
    for name in ("Net", "loss", "Shift", "Doubled"):
        assert digest_of(vars(one)[name]) == digest_of(vars(other)[name])


def test_a_digest_of_bytecode_has_the_version_of_python() -> None:
    assert digest_of(lambda: 1).endswith(f" {PYTHON}")
    assert " " not in digest_of(fx.models.mlp(3, 4, 2), torch.relu, Fraction(1, 2), [1.0, "a"])


def test_a_file_called_like_a_standard_module_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert origin("statistics") == "library"
    study = imported(tmp_path, STUDY, name="statistics")
    edited = imported(tmp_path, STUDY.replace("torch.relu(", "F.gelu("), name="statistics")
    monkeypatch.setitem(sys.modules, "statistics", study)
    origin.cache_clear()
    assert digest_of(study.Net) != digest_of(edited.Net)
    origin.cache_clear()


# Keys -------------------------------------------------------------------------------------------


def test_a_key_is_by_value_where_code_is_the_same_object() -> None:
    assert key_of(closed_over(1.0)) == key_of(closed_over(1.0))
    assert key_of(fx.fedexp(0.1)) == key_of(fx.fedexp(0.1)) != key_of(fx.fedexp(0.2))
    assert key_of(fx.fedadam()) != key_of(fx.fedyogi())  # equal fields
    assert key_of(with_attribute(1.0)) == key_of(with_attribute(1.0))
    assert key_of(lambda x: x) != key_of(lambda x: x)
    assert key_of(Hidden(1.0)) != key_of(Hidden(1.0))
    assert hash(key_of([closed_over(1.0)])) == hash(key_of([closed_over(1.0)]))


def test_a_key_holds_no_mutable_state() -> None:
    value = with_attribute(1.0)
    key = key_of(value)
    vars(value)["note"] = 2.0
    assert key == key_of(with_attribute(1.0)) != key_of(value)


def test_tensors_outside_models_are_equal_to_themselves_until_written_to() -> None:
    tensor = torch.zeros(2)
    key = key_of({"a": tensor})
    assert key == key_of({"a": tensor})
    assert key != key_of({"a": torch.zeros(2)})
    tensor[0] = 1
    assert key != key_of({"a": tensor})


def test_of_tensors_inside_models_inputs_do_not_count_but_their_places() -> None:
    def key(frozen: float, swapped: bool = False) -> Any:
        layer = nn.Bilinear(2, 2, 2)
        vars(layer)["table"] = torch.tensor(frozen)
        inputs = [layer.weight, layer.bias]
        return key_of(layer, inputs[::-1] if swapped else inputs)

    assert key(1.0) == key(1.0) != key(2.0)
    assert key(1.0) != key(1.0, swapped=True)


def test_a_tied_weight_is_no_two_weights() -> None:
    def tied(shared: bool) -> nn.Module:
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        if shared:
            other.weight = one.weight
        return nn.Sequential(one, other)

    def key(shared: bool) -> Any:
        module = tied(shared)
        return key_of(module, [*module.parameters()])

    assert digest_of(tied(True)) == digest_of(tied(True)) != digest_of(tied(False))
    assert key(True) == key(True) != key(False)


def test_layers_hold_their_weights_in_weak_references() -> None:
    one, other = (ModuleObjective(lambda: nn.LSTM(3, 2)).constants() for _ in range(2))
    assert key_of(one.values[0], one.inputs) == key_of(other.values[0], other.inputs)
