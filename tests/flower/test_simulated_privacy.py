"""A private run on Flower and the same one in the simulator: equal step sizes, models and costs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import fedexp as fx
from fedexp.flower import FedAvg, FedExP, FedExPM, local_privacy
from fedexp.privacy import CentralPrivacy, LocalPrivacy
from tests.flower.helpers.fake_grid import FakeGrid, FakeNode
from tests.flower.helpers.private import NODES, app, model, strategy, update, weights
from tests.helpers.problems import vectors_task

pytestmark = pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
ROUNDS = 3
RULES: dict[str, tuple[Any, fx.Algorithm]] = {
    "fedavg": (FedAvg, fx.fedavg()),
    "fedexp": (FedExP, fx.fedexp()),
    "fedexp-m": (FedExPM, fx.fedexp_m()),
    "fedexp, bound": (partial(FedExP, bound=1.5), fx.fedexp(bound=1.5)),
}
SHARED = ("server_lr", "epsilon", "delta", "noise_share", "clients")


def on_flower(rule: Any, grid: FakeGrid, privacy: Any) -> tuple[list[Any], NDArray[Any]]:
    result = strategy(rule, privacy=privacy).start(grid, model(), ROUNDS)
    rows = [result.train_metrics_clientapp[k] for k in range(1, ROUNDS + 1)]
    return rows, weights(result.arrays)


def simulated(algorithm: fx.Algorithm, privacy: Any) -> tuple[list[Any], NDArray[Any]]:
    task = vectors_task(torch.stack([torch.from_numpy(update(k)) for k in range(NODES)]))
    records = list(fx.simulate(task, algorithm, ROUNDS, privacy=privacy, engine="loop"))
    return [record.to_json() for record in records], records[-1].state.output()[0].numpy()


def assert_same(one: tuple[list[Any], Any], other: tuple[list[Any], Any]) -> None:
    for ours, theirs in zip(one[0], other[0], strict=True):
        for name in SHARED:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
    np.testing.assert_allclose(one[1], other[1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("noise", [0.02, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_central_privacy_is_that_of_flower(name: str, noise: float) -> None:
    rule, algorithm = RULES[name]
    privacy = CentralPrivacy(clip=0.8, delta=1e-5, noise_multiplier=noise, noise_seed=5)
    theirs = on_flower(rule, FakeGrid(app(), NODES), privacy)
    assert_same(simulated(algorithm, privacy), theirs)
    if name == "fedexp" and noise < 0.1:
        assert theirs[0][0]["server_lr"] > 2  # the step that is corrected for noise


def test_epsilon_gives_the_same_noise_as_on_flower() -> None:
    privacy = CentralPrivacy(clip=0.8, delta=1e-5, epsilon=20.0, noise_seed=5)
    theirs = on_flower(FedExP, FakeGrid(app(), NODES), privacy)
    assert_same(simulated(fx.fedexp(), privacy), theirs)
    assert theirs[0][-1]["epsilon"] == pytest.approx(20.0)


@pytest.mark.parametrize("name", ["fedavg", "fedexp", "fedexp-m"])
def test_local_privacy_is_that_of_flower(name: str) -> None:
    """A client's noise follows from its node id, here the number of the client."""
    rule, algorithm = RULES[name]
    privacy = LocalPrivacy(clip=0.8, delta=1e-5, noise_multiplier=0.01, noise_seed=5)
    grid = FakeGrid(app(mods=[local_privacy(privacy)]), NODES)
    grid.nodes = [FakeNode(k, node.context.node_config, {}) for k, node in enumerate(grid.nodes)]
    assert_same(simulated(algorithm, privacy), on_flower(rule, grid, privacy))
