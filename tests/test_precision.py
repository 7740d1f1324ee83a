"""Devices, and the loop on one without float64, such as mps.

No such machine was at hand: a CPU stands in that is not allowed any float64 tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedexp as fx
from fedexp import precision
from fedexp.data import Federation, Images
from fedexp.engine.select import select_engine
from fedexp.tasks import Task, evaluation
from tests.engine.helpers import work_of
from tests.helpers.problems import BatchNormNet, classes_task, dropout_net, least_squares
from tests.helpers.rules import ALGORITHMS, rule_id


class NoFloat64(TorchDispatchMode):
    """Raise for any operation with a float64 result, except on the host."""

    on_host = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.dtype == torch.float64 and not self.on_host:
                raise TypeError(f"{func} returns float64")
        return result

    def exempt(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of the host, whose result is converted before it is copied."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.on_host += 1
            try:
                result = function(*args, **kwargs)
                return result.float() if isinstance(result, Tensor) else result
            finally:
                self.on_host -= 1

        return call


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> NoFloat64:
    monkeypatch.setattr(precision, "NO_FLOAT64", {"mps", "cpu"})
    mode = NoFloat64()  # type: ignore[no-untyped-call]
    for function in (evaluation.weights_of_clients, evaluation.weights_of_examples):
        monkeypatch.setattr(f"fedexp.tasks.task.{function.__name__}", mode.exempt(function))
    return mode


def pictures() -> Task:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 1, 8, 8), generator=rng, dtype=torch.uint8)
    y = torch.randint(0, 3, (40,), generator=rng)
    build = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))  # noqa: E731
    train = Federation({"x": x, "y": y}, np.arange(5) * 10)
    return fx.tasks.classification("p", build, train, transform=Images((0.5,), (0.25,), pad=1))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_the_loop_needs_no_float64(algorithm: fx.Algorithm, forbidden: NoFloat64) -> None:
    """Clipping, weights by size, sums, server step, evaluation."""
    local = fx.LocalTraining(lr=0.05, steps=4, batch_size=4, clip_norm=0.1, weight_decay=0.01)
    with forbidden:
        run = fx.simulate(
            classes_task(BatchNormNet), algorithm, 3, 3, local=local, weighting="size",
            engine="loop",
        )  # fmt: skip
        records = list(run)
    assert records[-1].test_loss is not None
    assert all(value.dtype != torch.float64 for value in records[-1].state.server.values())


@pytest.mark.parametrize("build", [dropout_net, BatchNormNet])
def test_numbers_are_those_in_float64_up_to_rounding(
    build: Any, request: pytest.FixtureRequest
) -> None:
    def run() -> list[fx.Record]:
        return list(fx.simulate(classes_task(build), fx.fedexp(), 4, 3, engine="loop"))

    wide = run()
    with request.getfixturevalue("forbidden"):
        narrow = run()
    for one, other in zip(wide, narrow, strict=True):
        torch.testing.assert_close(one.state.params, other.state.params, rtol=1e-4, atol=1e-5)
        assert one.server_lr == pytest.approx(other.server_lr, rel=1e-4)
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"momentum": 0.9}, {"optimizer": "adam"}, {"step_schedule": "cosine"}], ids=str
)
def test_local_optimisers_and_images_need_no_float64(
    options: dict[str, Any], forbidden: NoFloat64
) -> None:
    local = fx.LocalTraining(lr=0.01, steps=3, batch_size=4, clip_norm=0.1, **options)
    with forbidden:
        list(fx.simulate(pictures(), fx.fedexp(), 2, local=local, engine="loop"))


def test_float64_is_refused_where_there_is_none(forbidden: NoFloat64) -> None:
    with pytest.raises(fx.UsageError, match="has no float64; convert the data and the model"):
        fx.simulate(least_squares(), fx.fedavg(), 1)


def test_the_stand_in_notices_float64() -> None:
    with pytest.raises(TypeError, match="returns float64"), NoFloat64():  # type: ignore[no-untyped-call]
        list(fx.simulate(classes_task(), fx.fedavg(), 1, engine="loop"))


def test_auto_takes_the_loop_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state claims to be on such a device: nothing is computed there."""
    task = classes_task()
    state = fx.SimulationState.initial(task, fx.fedavg(), 0)

    class Elsewhere:
        def __init__(self, params: Tensor) -> None:
            self.device = torch.device("mps")

    there = replace(state, params=Elsewhere(state.params))  # type: ignore[arg-type]
    assert select_engine("auto", work_of(task, fx.fedavg()), there).engine.name == "loop"
    with pytest.raises(fx.UsageError, match=r"'batched' cannot be used.*or the device"):
        select_engine("batched", work_of(task, fx.fedavg()), there)


def test_devices_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, message in {
        "gpu": "unknown device 'gpu'; use cpu, cuda or mps",
        "meta": "cannot train on meta; use cpu, cuda or mps",
    }.items():
        with pytest.raises(fx.UsageError, match=message):
            fx.simulate(classes_task(), fx.fedavg(), 1, device=name)
    if not torch.backends.mps.is_available():
        with pytest.raises(fx.UsageError, match="there is no MPS device here; leave device out"):
            fx.simulate(classes_task(), fx.fedavg(), 1, device="mps")
    monkeypatch.setattr("fedexp.precision.mps.is_available", lambda: True)
    assert precision.checked_device("mps").type == "mps"
    assert precision.default_precision(torch.device("mps")) == "float32"
    with pytest.raises(fx.UsageError, match="tf32 is a mode of NVIDIA GPUs"):
        precision.check_precision("tf32", torch.device("mps"))
