"""Workers in processes of their own, started by torchrun on the loopback interface."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedexp as fx
from tests.helpers.processes import LONGEST, started
from tests.outer.averages import CASES, RULE, WORKERS, gradients

EXAMPLE = Path(__file__).parents[2] / "examples" / "outer" / "local_sgd.py"
ROUNDS, STEPS = 4, 3


LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(*arguments: str) -> str:
    """Run Python on the loopback interface; return what it printed."""
    with started([sys.executable, *arguments], env=LOOPBACK) as process:
        output, errors = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, errors
    return output


@pytest.fixture(scope="module")
def averages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What is left on each worker, by case."""
    path = tmp_path_factory.mktemp("averages") / "rank"
    run("-m", "tests.outer.averages", str(path))
    ranks = [torch.load(f"{path}.{rank}") for rank in range(WORKERS)]
    return {case: [rank[case] for rank in ranks] for case in CASES}


def expected(case: str, workers: list[int]) -> tuple[Tensor, Tensor, dict[str, float]]:
    """The mean, the weights after the step, and the metrics, from the updates of some workers."""
    rows = [torch.cat([g.flatten() for g in gradients(rank, case)]) for rank in workers]
    sums, w = fx.Aggregate.of(torch.stack(rows).double()), torch.zeros(11)
    after, _, metrics = RULE.step(w, sums, RULE.init(w))
    return sums.mean, after, {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("case", "workers", "tolerance"),
    [
        ("all", [0, 1, 2, 3], 1e-6),
        ("one is not finite", [0, 2, 3], 1e-6),
        ("a group of two", [0, 1], 1e-6),
        ("bfloat16", [0, 1, 2, 3], 2**-7),  # the mean is rounded to 8 bits in .grad
    ],
)
def test_workers_step_alike_on_the_mean_of_the_finite_updates(
    averages: dict[str, list[dict[str, Any]]], case: str, workers: list[int], tolerance: float
) -> None:
    mean, after, metrics = expected(case, workers)
    ranks = [rank for rank in averages[case] if rank]
    for rank in ranks:
        for name, value in (("grads", mean), ("params", after)):
            vector = torch.cat([part.flatten() for part in rank[name]]).double()
            torch.testing.assert_close(vector, value.double(), rtol=tolerance, atol=tolerance)
            assert all(map(torch.equal, rank[name], ranks[0][name]))
        left_out = len(ranks) - len(workers)
        counts = {"count": len(workers), "dropped": left_out}
        assert rank["metrics"] == pytest.approx({**metrics, **counts}, rel=2 * tolerance)
        assert rank["metrics"] == ranks[0]["metrics"]
        assert len(rank["warnings"]) == left_out


def test_without_a_finite_update_no_worker_steps(
    averages: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in averages["none is finite"]:
        assert "4 workers are left out" in rank["warnings"][0]
        assert "is not finite, and was not taken" in rank["error"]
        assert not any(part.any() for part in rank["params"])


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@cache
def example() -> dict[str, Any]:
    assert len(EXAMPLE.read_text().splitlines()) < 120
    return runpy.run_path(str(EXAMPLE))


def updates(w: Tensor, draws: list[torch.Generator]) -> Tensor:
    """Train all workers of the example from w, in this process; return their updates [4, d]."""
    page = example()
    model = page["build_model"]()
    deltas = []
    for worker in range(WORKERS):
        torch.nn.utils.vector_to_parameters(w.clone(), model.parameters())
        page["local_steps"](model, page["part_of"](worker, WORKERS), STEPS, draws[worker])
        deltas.append(w - torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    return torch.stack(deltas)


def test_local_sgd_equals_a_simulation_in_one_process(tmp_path: Path) -> None:
    """In float64, to the rounding of the all-reduce, which adds workers in another order.

    Both equal the formula, η = max(1, m / (2 (s + 0.05 m))).
    """
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(WORKERS)]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    options = ["--rounds", str(ROUNDS), "--steps", str(STEPS), "--double"]
    command = [*launcher, *rendezvous, "--local-addr", "127.0.0.1", str(EXAMPLE), *options]
    printed = run(*command, "--save", str(tmp_path / "weights"))
    stored = torch.load(tmp_path / "weights").values()

    with float64():
        rule, model = example()["RULES"]["fedexp"], example()["build_model"]()
        w = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        draws = [torch.Generator().manual_seed(worker) for worker in range(WORKERS)]
        state, iterates, etas = rule.init(w), [], []
        for _ in range(ROUNDS):
            deltas = updates(w, draws)
            one, two, three, four = deltas
            mean = (one + two + three + four) / 4
            m = sum(float(delta @ delta) for delta in (one, two, three, four)) / 4
            etas.append(max(1.0, m / (2 * (float(mean @ mean) + 0.05 * m))))
            by_hand = w - etas[-1] * mean
            w, state, _ = rule.step(w, fx.Aggregate.of(deltas), state)
            torch.testing.assert_close(w, by_hand, rtol=1e-12, atol=1e-14)
            iterates.append(w)
    assert min(etas) > 1
    weights = torch.cat([value.flatten() for value in stored])
    output = (iterates[-2] + iterates[-1]) / 2
    torch.testing.assert_close(weights, output, rtol=1e-12, atol=1e-14)
    found = [line.split("server_lr ")[1].split()[0] for line in printed.splitlines()]
    assert found == [f"{eta:.3g}" for eta in etas]
