"""Two convolutions and a maximum in tiles: what the layers give one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.engine.threads import Threads
from fedexp.objective import ModuleObjective, tile_steps, tiled
from fedexp.objective.own_gradient import OwnLinear
from fedexp.objective.private import OwnDropout, PrivateCopy
from fedexp.objective.tiled import TiledFront, tile_front
from tests.engine.test_threads import engine_for, last
from tests.rules import ALGORITHMS, rule_id

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def front(colours: int = 1, between: int = 32, after: int = 33) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(colours, between, 3), nn.ReLU(), nn.Conv2d(between, after, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(),
    ).double()  # fmt: skip


def network() -> nn.Sequential:
    return nn.Sequential(*front(), nn.Linear(33 * 64, 50), nn.Linear(50, 3)).double()


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    out = model(x)
    return [out, *torch.autograd.grad((out + out.square()).sum(), list(model.parameters()))]


def assert_same(x: Tensor, colours: int = 1) -> None:
    model = front(colours)
    plain = results(model, x)
    tile_front(model)
    assert isinstance(model[0], TiledFront)
    torch.testing.assert_close(results(model, x), plain, **EXACT)
    torch.testing.assert_close(results(model, x), plain, **EXACT)  # in memory that was used


@pytest.fixture
def never_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a test cannot pass by way of the layers themselves."""
    monkeypatch.setattr(tiled, "_can", lambda x, weights: True)


@pytest.mark.usefixtures("never_plain")
@pytest.mark.parametrize("images", [1, 5, 7, 12])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (20, 24)])
@pytest.mark.parametrize("colours", [1, 3])
def test_same_numbers_and_gradients(images: int, height: int, width: int, colours: int) -> None:
    assert_same(torch.randn(images, colours, height, width, dtype=torch.float64), colours)


@pytest.mark.usefixtures("never_plain")
def test_same_numbers_without_torchscript(monkeypatch: pytest.MonkeyPatch) -> None:
    tile_steps.scripted.cache_clear()
    monkeypatch.delattr(torch.jit, "script")
    assert tile_steps.scripted(tile_steps.back) is tile_steps.back
    assert_same(torch.randn(6, 1, 8, 8, dtype=torch.float64))
    tile_steps.scripted.cache_clear()


def test_copies_are_compiled_before_there_are_threads() -> None:
    tile_steps.scripted.cache_clear()
    tile_front(front())
    assert tile_steps.scripted.cache_info().currsize == 2


def test_torchscript_is_used() -> None:
    assert isinstance(tile_steps.scripted(tile_steps.forth), torch.jit.ScriptFunction)


@pytest.mark.usefixtures("never_plain")
def test_of_equal_values_the_first_counts_and_what_relu_stops_does_not() -> None:
    model, x = front(), torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        for param in model.parameters():  # all outputs of a channel are its bias, exactly
            param.copy_(torch.linspace(-1, 1, len(param)) if param.ndim == 1 else 0.0 * param)
    plain = results(model, x)
    assert (plain[0] == 0).any()
    assert (plain[0] > 0).any()
    tile_front(model)
    torch.testing.assert_close(results(model, x), plain, **EXACT)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_rounds_agree_with_the_loop(algorithm: fx.Algorithm, two_threads: None) -> None:
    task = images_task()
    assert isinstance(engine_for(task), Threads)
    one, other = (last(task, algorithm, engine) for engine in ("loop", "auto"))
    torch.testing.assert_close(one.params, other.params, **EXACT)


@pytest.fixture
def two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def images_task() -> fx.tasks.Task:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, 20, 20, dtype=torch.float64, generator=draw)
    y = torch.randint(3, (30,), generator=draw)
    train = fx.data.Federation({"x": x, "y": y}, np.array([0, 6, 13, 30]))
    local = fx.LocalTraining(lr=0.1, steps=2, batch_size=6, weight_decay=0.01, clip_norm=1.0)
    return fx.tasks.classification("images", network, train, local=local)


def test_rounds_give_the_same_bits_every_time(two_threads: None) -> None:
    task = images_task()
    params = [last(task, fx.fedexp(), "auto").params for _ in range(2)]
    assert torch.equal(*params)


def test_the_copy_of_emnists_network() -> None:
    objective = ModuleObjective(fx.models.emnist_cnn)
    copy, (params, buffers) = PrivateCopy(objective).objective, objective.initial(0)
    kinds = [type(m) for m in copy.module.children() if type(m) is not nn.Identity]
    assert kinds == [
        TiledFront, nn.Flatten, OwnDropout, OwnLinear, nn.ReLU, OwnDropout, nn.Linear
    ]  # fmt: skip
    for each in (objective, copy):
        each.module.eval()  # no dropout
    batch = {"x": torch.randn(7, 1, 28, 28), "y": torch.arange(7)}
    one, other = (o._gradient(params, buffers, batch)[0] for o in (objective, copy))
    assert (one - other).norm() <= 1e-4 * one.norm()  # float32: 1e-6, or 1e-3 of another maximum


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(4, nn.MaxPool2d(3)),
        lambda m: m.__setitem__(0, nn.Conv2d(1, 32, 3, padding=1)),
        lambda m: m.__setitem__(2, nn.Conv2d(32, 64, 3, bias=False)),
        lambda m: m.__setitem__(2, nn.Conv2d(32, 16, 3)),
        lambda m: m.__setitem__(0, nn.Conv2d(4, 32, 3)),
        lambda m: m[1].register_forward_hook(lambda *_: None),
        lambda m: m[2].register_full_backward_pre_hook(lambda *_: None),
        lambda m: setattr(m[2], "forward", lambda x: x),
        lambda m: m.__setitem__(4, nn.MaxPool2d(2, return_indices=True)),
        lambda m: m[0].register_buffer("weight", m[0]._parameters.pop("weight").detach()),
        lambda m: nn.utils.parametrizations.weight_norm(m[2]),
    ],
    ids=[
        "pool",
        "padding",
        "bias",
        "channels",
        "colours",
        "hook",
        "backward hook",
        "forward",
        "indices",
        "buffer",
        "parametrized",
    ],
)
def test_other_layers_stay_as_they_are(change: Any) -> None:
    model = front()
    change(model)
    before = list(model)
    tile_front(model)
    assert list(model) == before


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3, 1, 28, 28), torch.zeros(4, 1, 16, 28), torch.zeros(4, 1, 28, 26)],
    ids=["few", "small", "part of a tile"],
)
def test_other_images_take_the_layers(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = front().float()
    tile_front(model)
    monkeypatch.setattr(tiled, "_Tiled", None)
    model(x)
    with pytest.raises(AttributeError):
        model(torch.zeros(4, 1, 28, 28))
