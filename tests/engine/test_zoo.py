"""Every engine on every model of the zoo, against the loop, and the loop against plain torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.errors import EngineWarning, UsageError
from fedexp.objective import LeastSquares, ModuleObjective
from fedexp.tasks import Task
from tests.engine.helpers import needs_cuda
from tests.engine.reference import Problem, Recipe, train
from tests.engine.zoo import CASES, REFUSED, Case, Refused, examples
from tests.engine.zoo_models import cross_entropy
from tests.engine.zoo_runs import (
    BATCH,
    BY_NAME,
    EXACT,
    RECIPES,
    ROUNDS,
    SEED,
    algorithm_of,
    assert_as_exact,
    by_loop,
    by_reference,
    data_of,
    gap,
    local_of,
    outcome,
    recipe_of,
    run,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
]

NAMED = ("threads", "batched", "dense", "quadratic")  # beside the loop and "auto"
# torch has no Fourier transform in bf16, and its fused attention needs masks of aligned rows there
WITHOUT_BF16 = ("fft", "attention-fused-causal")


def case_id(case: Case) -> str:
    return case.name


@contextmanager
def library_threads(count: int) -> Iterator[None]:
    """Let torch use so many threads: two only where the engine needs them, as cores may be busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_the_zoo_is_large() -> None:
    assert len(BY_NAME) == len(CASES) >= 45
    assert {recipe_of(case) for case in CASES} == set(RECIPES)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_loop_is_plain_torch(case: Case) -> None:
    exact = by_reference(case.name, torch.float64)
    ours = by_loop(case.name, torch.float64)
    found = gap(ours, exact, case)
    assert found.params <= EXACT
    assert found.buffers <= EXACT
    assert ours.steps[-1] == pytest.approx(exact.steps[-1], rel=EXACT)
    assert_as_exact(by_loop(case.name, torch.float32), case)


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("engine", NAMED)
def test_a_named_engine_is_the_loop_or_refuses(case: Case, engine: str) -> None:
    must = {"threads": case.threads, "batched": case.batched, "dense": case.dense}.get(
        engine, False
    )
    refusal = None
    try:
        with library_threads(2 if engine == "threads" else 1):
            task, record = run(case, torch.float64, engine)
    except UsageError as error:
        refusal = str(error)
    if refusal is not None:
        assert not must, f"{engine} must train it, but: {refusal}"
        assert "\n" not in refusal
        assert engine in refusal or "engine" in refusal
        return
    assert must is not False, f"{engine} must refuse it"
    assert record.engine.startswith(engine)
    if not case.redraws:
        found = gap(outcome(task, record), by_loop(case.name, torch.float64), case)
        assert found.params <= EXACT
        assert found.buffers <= EXACT


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_auto_is_never_wrong(case: Case) -> None:
    with warnings.catch_warnings(), library_threads(2 if case.large else 1):
        warnings.simplefilter("ignore", EngineWarning)
        task, record = run(case, torch.float32, "auto")
    assert record.engine
    if not case.redraws:
        assert_as_exact(outcome(task, record), case)


@needs_cuda
@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=case_id)
def test_a_gpu_batches_what_can_be_batched(case: Case) -> None:
    """By `auto`, in float64 to the loop's numbers; the noise of bf16 passes the trial."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        # a loss that copies from the host in every call runs without a graph
        warnings.filterwarnings("ignore", ".*not captured.*synchronizing", EngineWarning)
        task, record = run(case, torch.float64, "auto", device="cuda", precision="float32")
        assert record.engine.startswith("batched")
        if case.name not in WITHOUT_BF16:
            _, half = run(case, torch.float32, "auto", device="cuda", precision="bf16")
            assert half.engine.startswith("batched")
    if not case.redraws:
        found = gap(outcome(task, record), by_loop(case.name, torch.float64, "cuda"), case)
        assert found.params <= EXACT
        assert found.buffers <= EXACT


@needs_cuda
@pytest.mark.parametrize("case", [case for case in CASES if not case.batched], ids=case_id)
def test_a_gpu_is_never_wrong(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EngineWarning)
        task, record = run(case, torch.float64, "auto", device="cuda", precision="float32")
    if not case.redraws:
        found = gap(outcome(task, record), by_loop(case.name, torch.float64, "cuda"), case)
        assert found.params <= EXACT
        assert found.buffers <= EXACT


@pytest.mark.parametrize("name", [case.name for case in CASES if case.labels == "each"])
def test_labels_per_token_are_counted_per_token(name: str) -> None:
    case = BY_NAME[name]
    task, record = run(case, torch.float64, "loop")
    assert isinstance(task.objective, ModuleObjective)
    module = task.objective.load(*record.state.output()).eval()
    x, y = data_of(case, torch.float64)
    with torch.no_grad():
        output = module(x)
    right = (output.argmax(1) == y).double().mean(1).split(case.sizes)
    losses = cross_entropy(output, y).mean(1).split(case.sizes)
    # clients count alike, whatever their sizes (eq. 1)
    for value, each in ((record.train_accuracy, right), (record.train_loss, losses)):
        assert value == pytest.approx(float(np.mean([part.mean() for part in each])), rel=EXACT)


def attempt(case: Refused, engine: str) -> None:
    x, y = examples(case.data, case.labels, sum(case.sizes))
    train = Federation({"x": x, "y": y}, np.cumsum([0, *case.sizes]))
    local = fx.LocalTraining(lr=0.1, epochs=1, batch_size=BATCH)
    options: dict[str, Any] = {"engine": engine}
    objective = ModuleObjective(case.build, case.loss, classifies=case.loss is None)
    list(fx.simulate(Task("zoo", objective, train, local), fx.fedavg(), 1, **options))


@pytest.mark.filterwarnings("ignore::fedexp.errors.EngineWarning")
@pytest.mark.parametrize("engine", ["loop", "auto", "batched"])
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_trained_is_refused_in_one_line(case: Refused, engine: str) -> None:
    with pytest.raises(UsageError, match=case.words) as caught:
        attempt(case, engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_the_quadratic_engine_is_plain_torch(recipe: Recipe) -> None:
    """Least squares on whole clients: F = ||Aw - b||²/2 for the gradient, as the package has it."""
    sizes, steps = (7, 10, 12, 6), 5
    recipe = replace(recipe, lr=0.01, clip=None, weigh=False)
    x, y = (value.double() for value in examples("vectors", "numbers", sum(sizes)))
    module = nn.Linear(x.shape[1], 1, bias=False, dtype=torch.float64)
    start = module.weight.detach()[0].clone()
    plain = train(
        Problem(
            worker=module,
            loss=lambda output, y: (output - y).square().sum() / 2,
            clients=list(zip(x.split(sizes), y.split(sizes), strict=True)),
            cohorts=[range(len(sizes))] * ROUNDS,
            batches=lambda r, i: [range(sizes[i])] * steps,
            draws=lambda r, i: nullcontext(),
        ),
        recipe,
    )
    federation = Federation({"x": x, "y": y[:, 0]}, np.cumsum([0, *sizes]))
    local = replace(local_of(recipe), epochs=None, steps=steps, batch_size=None)
    task = Task("squares", LeastSquares(start), federation, local, sums=True)
    for engine in ("loop", "quadratic"):
        options: dict[str, Any] = {"engine": engine}
        *_, last = fx.simulate(task, algorithm_of(recipe), ROUNDS, seed=SEED, **options)
        off = last.state.params - plain.params["weight"][0]
        assert off.norm() <= EXACT * (start - plain.params["weight"][0]).norm()
        assert last.engine.startswith(engine)


STACKED = (
    "embedding", "embedding-padding", "lstm", "lstm-two-layers", "lstm-per-token", "gru",
    "gru-per-token", "gru-in-steps", "rnn", "layer-norm", "multihead-attention", "attention-cross",
    "transformer-norm-first", "transformer-norm-last", "transformer-time-first",
    "transformer-causal", "attention-fused", "per-token-labels",
)  # fmt: skip


@pytest.mark.parametrize("name", STACKED)
def test_sequence_models_have_stacked_layers(name: str) -> None:
    """In float64 to the loop's numbers; the noise of bf16 passes the trial."""
    case = BY_NAME[name]
    task, record = run(case, torch.float64, "batched")
    assert record.engine == "batched (layers)"
    found = gap(outcome(task, record), by_loop(name, torch.float64), case)
    assert found.params <= EXACT
    _, record = run(case, torch.float32, "batched", precision="bf16")
    assert record.engine == "batched (layers)"


@pytest.mark.parametrize("name", ["conv-batch-norm", "conv-instance-norm", "lstm-cell"])
def test_bf16_is_batched_and_its_noise_passes_the_trial(name: str) -> None:
    _, record = run(BY_NAME[name], torch.float32, "batched", precision="bf16")
    assert record.engine.startswith("batched (vmap")
