"""Flower's own simulation gives the numbers of ours."""

from __future__ import annotations

import pytest

from tests.flower.deploy.federation import ALL, Deployment, simulated


def test_same_step_sizes_and_weights_as_the_simulator(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("simulation")
    with Deployment(folder, nodes=3, simulation=True) as simulation:
        status, log = simulation.go("equal", algorithms="fedexp scaffold-exp", rounds=2)
    assert status == "finished:completed", log
    for name in ("fedexp", "scaffold-exp"):
        simulation.assert_same("equal", simulated(name, [ALL] * 2), name)
    assert not list(simulation.processes.family()), "processes were left behind"
