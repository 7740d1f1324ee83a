"""On a GPU: the loop, the batched program and its CUDA graph give the same rounds."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation, Images
from fedexp.engine.batched import Batched
from fedexp.engine.cuda_graph import RepeatedProgram
from fedexp.engine.select import EngineName, select_engine
from fedexp.errors import EngineWarning
from fedexp.precision import Precision, arithmetic
from fedexp.tasks import Task
from tests.engine.helpers import EXACT, needs_cuda, run_rounds, unequal, work_of
from tests.helpers.problems import least_squares
from tests.helpers.rules import ALGORITHMS, rule_id

pytestmark = needs_cuda
CUDA = torch.device("cuda")


def iterates(
    task: Task, algorithm: fx.Algorithm, graphs: bool, precision: Precision = "float32"
) -> list[Tensor]:
    """Four rounds of the batched engine, with and without graphs."""
    task, engine = task.to(CUDA, precision), Batched(graphs=graphs)
    records = run_rounds(engine, task, algorithm, 4, precision=precision)
    captured = "local training" if algorithm.client.needs_loss else "round"
    assert engine.cuda_graph == (captured if graphs else None)
    return [record.state.params for record in records]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_gpu_and_cpu_agree(algorithm: fx.Algorithm) -> None:
    """Float64, so that only the order of sums differs; the graph is replayed from round 2 on."""
    for task in (unequal(), least_squares(clients=6)):
        here = [r.state.params for r in fx.simulate(task, algorithm, 4, cohort=3, engine="loop")]
        for graphs in (False, True):
            there = iterates(task, algorithm, graphs)
            for one, other in zip(here, there, strict=True):
                torch.testing.assert_close(one, other.cpu(), **EXACT)


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=rule_id)
def test_whole_rounds_are_captured(algorithm: fx.Algorithm) -> None:
    """Every rule's step is in the graph, with weights too; a failed capture would warn."""
    task = unequal()
    both: list[tuple[EngineName, str]] = [("loop", "cpu"), ("batched", "cuda")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        here, there = (
            list(fx.simulate(task, algorithm, 4, 3, weighting="size", engine=e, device=d))
            for e, d in both
        )
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.state.params, other.state.params.cpu(), **EXACT)
        assert other.engine_choice is not None
        whole = "local training" if algorithm.client.needs_loss else "round"
        assert other.engine_choice.cuda_graph == whole


def test_learning_rate_decay_reaches_a_replayed_graph() -> None:
    task = unequal()
    local = fx.LocalTraining(lr=0.1, steps=3, batch_size=8, lr_decay=0.5)
    loop, batched = (
        [
            r.state.params.cpu()
            for r in fx.simulate(task, fx.fedavg(), 4, 3, local=local, engine=engine, device="cuda")
        ]
        for engine in ("loop", "batched")
    )
    for one, other in zip(loop, batched, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def pictures() -> Task:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (120, 1, 12, 12), dtype=np.uint8))
    fields = {"x": x, "y": torch.from_numpy(rng.integers(0, 3, 120))}
    return fx.tasks.classification(
        "pictures",
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(800, 3)
        ),
        Federation(fields, np.arange(7) * 20),
        transform=Images((0.5,), (0.25,), pad=2),
        local=fx.LocalTraining(lr=0.05, steps=4, batch_size=8),
    )


def test_augmented_images_agree_and_bf16_stays_near() -> None:
    full = iterates(pictures(), fx.fedexp(), graphs=True)
    loop = [r.state.params for r in fx.simulate(pictures(), fx.fedexp(), 4, 3, engine="loop")]
    for one, other in zip(loop, full, strict=True):
        torch.testing.assert_close(one, other.cpu(), rtol=1e-3, atol=1e-4)
    half = iterates(pictures(), fx.fedexp(), graphs=True, precision="bf16")
    start = pictures().objective.initial(0)[0]
    assert half[-1].dtype == torch.float32
    assert (half[-1].cpu() - full[-1].cpu()).norm() < 0.05 * (full[-1].cpu() - start).norm()


def test_unequal_writers_are_batched_in_bf16() -> None:
    """Rounding of half precision is not taken for disagreement with the loop."""
    rng, sizes = np.random.default_rng(0), (20, 60, 130)
    fields = {
        "x": torch.from_numpy(rng.integers(0, 256, (sum(sizes), 1, 28, 28), dtype=np.uint8)),
        "y": torch.from_numpy(rng.integers(0, 62, sum(sizes))),
    }
    writers = Federation(fields, np.cumsum([0, *sizes]))
    transform = Images((0.0,), (1.0,), augment=None)
    build = partial(fx.models.emnist_cnn, 62)
    task = fx.tasks.classification("writers", build, writers, transform=transform)
    task = task.to(CUDA, "bf16")
    state = fx.SimulationState.initial(task, fx.fedexp(), 0)
    with arithmetic("bf16"):
        selected = select_engine("auto", work_of(task, fx.fedexp()), state, "bf16")
    assert str(selected.choice) == "batched (layers)"


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True},
        {"optimizer": "adam", "weight_decay": 0.01},
        {"optimizer": "adamw", "weight_decay": 0.01, "step_schedule": "linear"},
        {"step_schedule": "cosine", "lr_schedule": "cosine"},
    ],
    ids=str,
)
def test_local_optimisers_and_schedules_are_captured(options: dict[str, Any]) -> None:
    task = unequal()
    local = fx.LocalTraining(lr=0.02, epochs=2, batch_size=8, clip_norm=0.5, **options)
    both: list[tuple[EngineName, str]] = [("loop", "cpu"), ("batched", "cuda")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        here, there = (
            list(fx.simulate(task, fx.fedexp(), 4, 3, local=local, engine=e, device=d))
            for e, d in both
        )
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one.state.params, other.state.params.cpu(), **EXACT)
        assert other.engine_choice is not None
        assert other.engine_choice.cuda_graph == "round"


@pytest.mark.parametrize("algorithm", [fx.fedexp(), fx.scaffold_exp()], ids=lambda a: a.name)
def test_cohorts_of_varying_size_have_a_graph_each(algorithm: fx.Algorithm) -> None:
    def choose(rng: np.random.Generator, round: int, federation: Federation) -> Any:
        return rng.permutation(federation.clients)[: (3, 1, 4, 3)[round - 1]]

    for task in (unequal(), pictures()):
        tolerance = EXACT if task.name == "unequal" else {"rtol": 1e-3, "atol": 1e-4}
        run = partial(fx.simulate, task, algorithm, 4, choose, precision="float32")
        here, there = list(run(engine="loop")), list(run(engine="batched", device="cuda"))
        for one, other in zip(here, there, strict=True):
            torch.testing.assert_close(one.state.params, other.state.params.cpu(), **tolerance)
            assert (one.clients, one.bytes_up) == (other.clients, other.bytes_up)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_a_captured_evaluation_follows_the_weights(precision: Precision) -> None:
    task = unequal().to(CUDA, precision)
    run = RepeatedProgram()
    with arithmetic(precision):
        for seed in range(3):
            state = fx.SimulationState.initial(task, fx.fedavg(), seed)
            found, expected = (task.evaluate(*state.output(), each) for each in (run, None))
            assert found == pytest.approx(expected, rel=1e-6)


def test_runs_with_unequal_clients_share_captured_graphs() -> None:
    """A graph is one step, so that cohorts of all sizes are replayed."""
    sizes = (40, 37, 33, 36, 39, 34, 35, 38)
    task = unequal(sizes=sizes)
    local = fx.LocalTraining(lr=0.1, epochs=1, batch_size=1)
    records = {
        engine: [r.state.params.cpu() for r in fx.simulate(
            task, fx.fedavg(), 4, cohort=2, local=local, engine=engine, device="cuda",
            precision="float32",
        )]
        for engine in ("loop", "batched")
    }  # fmt: skip
    for one, other in zip(*records.values(), strict=True):
        torch.testing.assert_close(one, other, **EXACT)
