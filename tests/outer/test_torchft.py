"""FedExP in torchft's DiLoCo: real replica groups, in a network of their own where that is allowed.

Every case equals a simulation in this process to rounding: there the norm is of one vector.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from tests.helpers.processes import LONGEST, started
from tests.outer.replicas import (
    CASES,
    KILLED_IN,
    REPLICAS,
    ROUNDS,
    ROUNDS_AFTER,
    STEPS,
    build_model,
    fragments,
    inner_step,
)

NAMESPACE = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
UNDISTURBED = [name for name in CASES if name != "killed"]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture
def without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedexp.outer.torchft", raising=False)
    for name in ("torchft", "torchft.manager"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_torchft")
def test_the_missing_extra_is_named_in_one_line() -> None:
    with pytest.raises(fx.UsageError) as caught:
        importlib.import_module("fedexp.outer.torchft")
    needed = "fedexp.outer.torchft needs torchft: pip install 'fedexp[torchft]'"
    assert str(caught.value) == needed


def train(folder: Path, *names: str) -> Results:
    """Train cases on replica groups; return by case what each replica recorded."""
    pytest.importorskip("torchft", reason="needs fedexp[torchft]")
    try:
        allowed = not subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode
    except FileNotFoundError:
        allowed = False
    command = [sys.executable, "-m", "tests.outer.replicas", str(folder / "replica"), *names]
    env = {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
    with started([*(NAMESPACE if allowed else []), *command], env=env) as process:
        output = "".join(process.communicate(timeout=LONGEST))
    assert process.returncode == 0, output
    replicas = [torch.load(folder / f"replica.{replica}") for replica in range(REPLICAS)]
    return {name: [replica[name] for replica in replicas] for name in names}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return train(tmp_path_factory.mktemp("replicas"), *UNDISTURBED)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return train(tmp_path_factory.mktemp("killed"), "killed")["killed"]


def vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def simulate(name: str, workers: list[list[int]]) -> Iterator[tuple[list[Tensor], Tensor, float]]:
    """Yield of each round the weights of the replicas, the output model, and the step size.

    Args:
        name: of the case.
        workers: by round, the replicas whose updates count. A replica whose update does not count
            starts the next round from the weights and the inner optimizer of the first one.
    """
    case = CASES[name]
    rule = case.rule or fx.Average()
    models = [build_model() for _ in range(REPLICAS)]
    inners = [case.inner(model.parameters()) for model in models]
    parts = [fragments(model, case.parts) for model in models]
    start = [vector(part) for part in parts[0]]
    states, iterates = [rule.init(w) for w in start], [list[Tensor]() for _ in start]
    for round, counting in enumerate(workers):
        for replica in counting:
            for step in range(STEPS):
                inner_step(models[replica], inners[replica], replica, round, step)
        for replica in set(range(REPLICAS)) - set(counting):
            models[replica].load_state_dict(models[0].state_dict())
            inners[replica].load_state_dict(inners[0].state_dict())
        k = round % case.parts
        deltas = torch.stack([start[k] - vector(parts[replica][k]) for replica in counting])
        start[k], states[k], metrics = rule.step(start[k], fx.Aggregate.of(deltas), states[k])
        iterates[k].append(start[k])
        for replica in range(REPLICAS):
            nn.utils.vector_to_parameters(start[k].clone(), parts[replica][k].parameters())
        output = [torch.stack(each[-rule.average_last :]).mean(dim=0) for each in iterates if each]
        yield [vector(model) for model in models], torch.cat(output), metrics["server_lr"].item()


def assert_equal(replicas: list[dict[str, Any]], name: str, workers: list[list[int]]) -> None:
    """Check the committed rounds of replicas, and the output model."""
    rounds = list(simulate(name, workers))
    for replica, result in enumerate(replicas):
        rows = {row["round"]: row for row in result["rows"] if row["committed"]}
        assert max(rows) == len(rounds)
        for round, row in rows.items():
            weights, _, eta = rounds[round - 1]
            torch.testing.assert_close(row["weights"], weights[replica], rtol=1e-11, atol=1e-12)
            counts = {"count": len(workers[round - 1])}
            if row["metrics"]:
                assert row["metrics"]["server_lr"] == pytest.approx(eta, rel=1e-11)
                assert row["metrics"]["count"] == counts["count"]
        torch.testing.assert_close(result["output"], rounds[-1][1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["DiLoCo", "local SGD", "momentum", "average", "fragments"])
def test_diloco_equals_a_simulation_in_one_process(results: Results, name: str) -> None:
    assert_equal(results[name], name, [[0, 1]] * ROUNDS)
    steps = [row["metrics"]["server_lr"] for row in results[name][0]["rows"]]
    assert len(set(steps)) == (1 if name == "average" else ROUNDS)


def test_local_sgd_of_torchft_is_diloco_that_averages(results: Results) -> None:
    assert_equal(results["torchft's LocalSGD"], "average", [[0, 1]] * ROUNDS)


def test_local_sgd_of_torchft_with_the_manager_is_refused(results: Results) -> None:
    for replica in results["LocalSGD by mistake"]:
        assert "LocalSGD has no outer optimizer, and is DiLoCo with" in replica["error"]


def test_a_round_with_an_update_that_is_not_finite_is_repeated(results: Results) -> None:
    name = "not finite"
    for replica in results[name]:
        committed = [row["committed"] for row in replica["rows"]]
        assert committed == [True, True, False, True, True]
        assert replica["rows"][2]["unchanged"]
    assert_equal(results[name], name, [[0, 1]] * ROUNDS)


def test_replicas_that_copy_the_first_one_count_from_the_second_round(results: Results) -> None:
    name = "init_sync"
    assert_equal(results[name], name, [[0], *[[0, 1]] * (ROUNDS - 1)])
    dropped = [row["metrics"]["dropped"] for row in results[name][1]["rows"]]
    assert dropped == [1, *[0] * (ROUNDS - 1)]


def test_a_killed_replica_recovers_and_ends_with_equal_weights(
    killed: list[dict[str, Any]],
) -> None:
    survivor, restarted = killed
    failed = [row for row in survivor["rows"] if not row["committed"]]
    assert failed[0]["round"] == KILLED_IN
    assert all(row["unchanged"] for row in failed)
    rows = {row["round"]: row for row in survivor["rows"] if row["committed"]}
    workers = [list(range(int(rows[round]["metrics"]["count"]))) for round in sorted(rows)]
    assert (
        workers
        == [[0, 1]] * KILLED_IN
        + [[0]] * (len(rows) - KILLED_IN - ROUNDS_AFTER)
        + [[0, 1]] * ROUNDS_AFTER
    )
    assert rows[len(rows) - ROUNDS_AFTER]["metrics"]["dropped"] == 1  # it had its donor's update
    assert_equal(killed, "killed", workers)
    assert torch.equal(survivor["rows"][-1]["weights"], restarted["rows"][-1]["weights"])
    assert torch.equal(survivor["output"], restarted["output"])
