"""State that no run carries is refused by name, and so are tensors that would not follow a weight.

Every case of the first two tables trained before, to numbers that depended on what had run in the
process or on weights that had stayed behind. Those of the last look alike and are trained.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn

import fedexp as fx
from fedexp.errors import UsageError
from fedexp.objective import ModuleObjective
from fedexp.objective.hidden_state import check_aliases
from fedexp.tasks import Task

Loss = Callable[[Tensor, Tensor], Tensor]
LOCAL = fx.LocalTraining(lr=0.3, epochs=2, batch_size=4)


def federation() -> fx.Federation:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return fx.Federation.from_ids({"x": x, "y": (x[:, 0] > 0).long()}, np.arange(40) % 4)


def direct(build: Callable[[], nn.Module], loss: Loss) -> Task:
    """Return a task that `supervised` has not checked."""
    objective = ModuleObjective(build, loss)
    return Task("own", objective, federation(), LOCAL, metric="train_accuracy")


def losses(task: Task, engine: Any = "loop") -> list[float | None]:
    return [record.train_loss for record in fx.simulate(task, fx.fedexp(), 2, engine=engine)]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


class Net(nn.Module):
    """Two dense layers; subclasses add what `setup` makes and `between` uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)
        self.setup()

    def setup(self) -> None: ...

    def between(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(torch.tanh(self.first(x))))
        return out


# State of a model -----------------------------------------------------------------------------


class MeanTeacher(Net):
    """Frozen parameters that follow the trained ones; at first they are the same."""

    def setup(self) -> None:
        self.teacher = copy.deepcopy(self.last).requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            for old, new in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.detach(), alpha=0.1)  # not counted as a write
        return h + 0.1 * self.teacher(h).sum(dim=1, keepdim=True)


class Counter(Net):
    """Acts from the hundredth call on."""

    calls = 0

    def between(self, h: Tensor) -> Tensor:
        self.calls += self.training
        return h if self.calls < 100 else 0.1 * h


class ClassCounter(Net):
    """Counts in an attribute of the class, beside one that cannot be pickled."""

    count = 0

    def setup(self) -> None:
        self.function = np.array([lambda: 0], dtype=object)

    def between(self, h: Tensor) -> Tensor:
        ClassCounter.count += 1
        return h if self.count < 100 else 0.1 * h


class LargeTeacher(MeanTeacher):
    """Frozen parameters that are summed up, not hashed."""

    def setup(self) -> None:
        super().setup()
        self.table = nn.Parameter(torch.zeros(2**19), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        self.table.data[-3:] += h.detach().mean()
        return h + self.table[-1]


class Alternating(Net):
    """Is after every second call what it was before."""

    flipped = False

    def between(self, h: Tensor) -> Tensor:
        self.flipped = not self.flipped
        return -h if self.flipped else h


class InEvaluation(Net):
    def setup(self) -> None:
        self.evaluated = 0

    def between(self, h: Tensor) -> Tensor:
        self.evaluated += not self.training
        return h / (1 + 0.1 * self.evaluated)


class RunningMean(Net):
    """The statistics of a normalisation, in a tensor that was not registered."""

    def setup(self) -> None:
        self.mean = torch.zeros(8)

    def between(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean


class Previous(Net):
    """Uses what the last call has left, which is the same after two equal calls."""

    previous: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        out = h if self.previous is None else h - self.previous
        self.previous = h.detach().mean(0)
        return out


class Queue(Net):
    """Subtracts a mean over calls, which is the same after equal calls alone."""

    def setup(self) -> None:
        self.means: deque[Tensor] = deque(maxlen=50)

    def between(self, h: Tensor) -> Tensor:
        self.means.append(h.detach().mean(0))
        return h - torch.stack(list(self.means)).mean(0)


class CountingHook(Net):
    def setup(self) -> None:
        calls = {"n": 0}

        def hook(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
            calls["n"] += 1
            return out / (1 + 0.1 * calls["n"])

        self.first.register_forward_hook(hook)


COUNTED = {"n": 0}


def counted(h: Tensor) -> Tensor:
    COUNTED["n"] += 1
    return h if COUNTED["n"] < 100 else 0.1 * h


class InHelper(Net):
    """Counts in a global that a method names, not forward."""

    def between(self, h: Tensor) -> Tensor:
        return counted(h)


class OwnGenerator(Net):
    def setup(self) -> None:
        self.draw = torch.Generator().manual_seed(1)

    def between(self, h: Tensor) -> Tensor:
        return h + 0.3 * torch.randn(h.shape, generator=self.draw)


class ByNumpy(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * float(np.random.uniform(0.5, 1.5))  # noqa: NPY002


MODELS: dict[str, type[Net]] = {
    r"teacher\.weight of the model": MeanTeacher,
    "calls of the model": Counter,
    "count of the model": ClassCounter,
    "table of the model": LargeTeacher,
    "flipped of the model": Alternating,
    "evaluated of the model": InEvaluation,
    "mean of the model": RunningMean,
    "previous of the model": Previous,
    r"means\.\d of the model": Queue,
    r"first\._forward_hooks\.\d+\.calls\.n of the model": CountingHook,
    r"COUNTED\.n of the model": InHelper,
    "draw of the model": OwnGenerator,
    "something that is not an attribute": ByNumpy,
}


# State of a loss ------------------------------------------------------------------------------


class Centred:
    centre: Tensor | float = 1.0

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = cross_entropy(outputs, y)
        self.centre = 0.9 * self.centre + 0.1 * values.detach().mean()
        return values / self.centre


class CentredModule(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = cross_entropy(outputs, y)
        self.scale.mul_(0.9).add_(0.1 * values.detach().mean())
        return values / self.scale


def in_closure() -> Loss:
    state = {"n": 0}

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        state["n"] += 1
        return cross_entropy(outputs, y) / (1 + 0.1 * state["n"])

    return loss


GLOBAL = [0]


def of_global(outputs: Tensor, y: Tensor) -> Tensor:
    GLOBAL[0] += 1
    return cross_entropy(outputs, y) / (1 + 0.1 * GLOBAL[0])


def with_default(outputs: Tensor, y: Tensor, *, seen: list[int]) -> Tensor:
    seen[0] += 1
    return cross_entropy(outputs, y) / (1 + 0.1 * seen[0])


CENTRED = Centred()
LOSSES: dict[str, Callable[[], Loss]] = {
    "^forward or the loss changes centre of the loss": Centred,
    "scale of the loss": CentredModule,
    r"state\.n of the loss": in_closure,
    r"GLOBAL\.0 of the loss": lambda: of_global,
    r"seen\.0 of the loss": lambda: partial(with_default, seen=[0]),
    r"CENTRED\.centre of the loss": lambda: lambda outputs, y: CENTRED(outputs, y),
    r"__call__|centre of the loss": lambda: Centred().__call__,
}
HIDDEN: list[Any] = [pytest.param(m, lambda: cross_entropy, w, id=w) for w, m in MODELS.items()]
HIDDEN += [pytest.param(Net, loss, words, id=words) for words, loss in LOSSES.items()]


@pytest.mark.filterwarnings("ignore::fedexp.errors.EngineWarning")
@pytest.mark.parametrize(("build", "loss", "words"), HIDDEN)
def test_state_that_no_run_carries_is_refused_by_name(
    build: type[Net], loss: Callable[[], Loss], words: str
) -> None:
    for engine in ("loop", "auto", "batched"):
        with pytest.raises(UsageError, match=words) as caught:
            losses(direct(build, loss()), engine)
        assert "\n" not in str(caught.value)
        assert "register_buffer" in str(caught.value)
    with pytest.raises(UsageError, match=words):
        fx.supervised("own", build, federation(), loss=loss())


# Aliases --------------------------------------------------------------------------------------


def with_part(net: Net) -> None:
    net.part = net.first.weight[:4]


def with_double(net: Net) -> None:
    net.parts = {"a": [2 * net.first.weight]}  # type: ignore[assignment]


def with_data(net: Net) -> None:
    net.decoder = net.first.weight.data


def with_buffer(net: Net) -> None:
    net.register_buffer("reference", net.first.weight.detach())


def with_list(net: Net) -> None:
    net.rows = [net.first.weight.detach()[3:5]]  # type: ignore[assignment]


def with_frozen(net: Net) -> None:
    net.last.register_parameter("own", nn.Parameter(net.first.bias.detach(), requires_grad=False))


def with_trained(net: Net) -> None:
    net.last.register_parameter("own", nn.Parameter(net.first.weight.detach()[2:4]))


def with_closure(net: Net) -> None:
    weight = net.first.weight.detach()
    net.act = lambda h: h @ weight  # type: ignore[assignment]


def with_array(net: Any) -> None:
    net.array = net.first.weight.detach().numpy()


ALIASES: dict[str, Callable[[Net], None]] = {
    "part of the model was computed from weights": with_part,
    r"parts\.a\.0 of the model was computed from weights": with_double,
    r"decoder and first\.weight of the model share": with_data,
    r"reference and first\.weight of the model share .*clone": with_buffer,
    r"first\.weight and rows\.0 of the model share": with_list,
    r"first\.bias and last\.own of the model share .*clone": with_frozen,
    r"first\.weight and last\.own of the model share .*register one nn\.Parameter": with_trained,
    r"first\.weight and act\.weight of the model share": with_closure,
    r"array and first\.weight of the model share": with_array,
}


@pytest.mark.parametrize("words", ALIASES)
def test_what_does_not_follow_a_weight_is_refused_by_name(words: str) -> None:
    def build() -> nn.Module:
        net = Net()
        ALIASES[words](net)
        return net

    for model in (build, build()):
        with pytest.raises(UsageError, match=words) as caught:
            ModuleObjective(model)
        assert "\n" not in str(caught.value)


class Tied(Net):
    """One parameter in three places, and two that are columns of one matrix."""

    def setup(self) -> None:
        left, right = (0.3 * torch.randn(8, 16)).chunk(2, dim=1)
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)
        self.second = nn.Linear(6, 8)
        self.second.weight = self.first.weight
        self.held = [self.first.weight]

    def between(self, h: Tensor) -> Tensor:
        return h @ self.left + h @ self.right @ self.second.weight @ self.held[0].T


def test_tied_weights_and_parts_of_one_memory_are_trained() -> None:
    task = direct(Tied, cross_entropy)
    *_, last = fx.simulate(task, fx.fedexp(), 1, engine="loop")
    model: Any = last.model()
    start: Any = Tied()
    assert model.second.weight is model.first.weight is model.held[0]
    assert not torch.equal(model.left, start.left)
    check_aliases(nn.Linear(3, 2).requires_grad_(False))


# What is trained ------------------------------------------------------------------------------


class Inspected(Net):
    """Leaves activations, shapes and a norm behind, in attributes and by a hook."""

    attention: Tensor | None = None
    rows, norm = 0, 0.0

    def setup(self) -> None:
        self.seen: dict[str, Tensor] = {}
        self.last.register_forward_hook(lambda m, a, out: self.seen.update(last=out.detach()))

    def between(self, h: Tensor) -> Tensor:
        self.attention, self.rows, self.norm = h, len(h), float(h.detach().norm())
        return h


class Cached(Net):
    """A table that grows with the longest input, as those of rotary embeddings do."""

    length, table = 0, torch.empty(0)

    def between(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.length:
            self.length, self.table = h.shape[1], torch.linspace(0, 1, h.shape[1])
        return h * self.table


class Trimmed(Net):
    """A table as long as the longest sequence so far; later examples are longer."""

    table: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        longest = int(h.detach().abs().max() * 100)
        if self.table is None or longest > len(self.table):
            self.table = torch.arange(longest) / 100
        return h + self.table[:8].sum() if longest >= 8 else h


FEATURES: dict[str, Tensor] = {}


class Hooked(Net):
    """Its hook names a global, which holds what another model has computed."""

    def setup(self) -> None:
        other = nn.Linear(6, 2)
        FEATURES["hidden"] = other(torch.ones(6))
        self.first.register_forward_hook(keep_features)


def keep_features(layer: nn.Module, args: Any, out: Tensor) -> None:
    FEATURES["hidden"] = out


class Masked(Net):
    def setup(self) -> None:
        self.drop = nn.Dropout(0.3)
        self.mask = torch.ones(8)

    def between(self, h: Tensor) -> Tensor:
        self.mask = self.drop(torch.rand(h.shape))
        return h * self.mask


class Recording:
    """A loss that records its values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        values = cross_entropy(outputs, y)
        self.values.append(float(values.detach().mean()))
        return values


def with_metric() -> Loss:
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        accuracy.update(outputs.detach(), y)
        return cross_entropy(outputs, y)

    return loss


HARMLESS: tuple[Any, ...] = (
    (Inspected, lambda: cross_entropy),
    (Cached, lambda: cross_entropy),
    (Trimmed, lambda: cross_entropy),
    (Hooked, lambda: cross_entropy),
    (Masked, lambda: cross_entropy),
    (Net, Recording),
    (Net, with_metric),
)


@pytest.mark.parametrize(("build", "loss"), HARMLESS)
def test_what_is_only_left_behind_is_trained_to_the_same_bits(
    build: type[Net], loss: Callable[[], Loss]
) -> None:
    task = direct(build, loss())
    assert losses(task) == losses(task) == losses(direct(build, loss()))
    made = fx.supervised("own", build, federation(), loss=loss(), local=LOCAL)
    assert losses(made) == losses(made)
