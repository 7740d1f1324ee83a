"""Every engine on every model of the zoo, against the loop, and the loop against plain torch.

In float64 two orders of the same additions differ by 1e-16 per term, so 1e-9 of the distance that
the weights travelled leaves no room for a wrong formula. In float32 rounding itself is measured: a
run may be off by four times as much as the plain float32 run is from the plain float64 run.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedexp as fx
from fedexp.data import Federation
from fedexp.engine.plan import plan_batches, sample_cohort
from fedexp.engine.state import Record
from fedexp.errors import EngineWarning, UsageError
from fedexp.objective import Buffers, LeastSquares, ModuleObjective
from fedexp.seeding import seeded_torch
from fedexp.tasks import Task
from tests.engine.reference import Named, Outcome, Problem, Recipe, train
from tests.engine.zoo import CASES, REFUSED, Case, Refused, examples
from tests.engine.zoo_models import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")

SEED, ROUNDS, COHORT, EPOCHS, BATCH = 3, 3, 3, 2, 4
EXACT = 1e-9
ROUNDING = 4.0  # times the distance between plain runs in float32 and float64
NAMED = ("threads", "batched", "dense", "quadratic")  # beside the loop and "auto"
# No transform of Fourier's in bf16 in torch; its fused attention wants masks of aligned rows there.
WITHOUT_BF16 = ("fft", "attention-fused-causal")
BY_NAME = {case.name: case for case in CASES}

RECIPES = (
    Recipe(lr=0.2, server="exp", eps=1e-3),
    Recipe(lr=0.1, clip=0.5, decay=0.05, client="prox", mu=0.3, server_lr=0.8),
    Recipe(lr=0.1, lr_decay=0.9, client="scaffold", server="exp", clip=1.0, decay=0.01),
    Recipe(lr=0.2, decay=0.02, server="exp", eps=1e-2, clip=0.7, weigh=True),
    Recipe(lr=0.1, client="scaffold", server_lr=1.2, weigh=True),
)


def recipe_of(case: Case) -> Recipe:
    """One of the recipes, by the name: it does not change when others join the table."""
    return RECIPES[zlib.crc32(case.name.encode()) % len(RECIPES)]


def algorithm_of(recipe: Recipe) -> fx.Algorithm:
    client = {"sgd": fx.SGD(), "prox": fx.Prox(recipe.mu), "scaffold": fx.Scaffold()}
    server = {"average": fx.Average(recipe.server_lr), "exp": fx.ExP(recipe.eps)}
    return fx.Algorithm("zoo", client=client[recipe.client], server=server[recipe.server])


def local_of(recipe: Recipe) -> fx.LocalTraining:
    return fx.LocalTraining(
        lr=recipe.lr, lr_decay=recipe.lr_decay, epochs=EPOCHS, batch_size=BATCH,
        clip_norm=recipe.clip, weight_decay=recipe.decay,
    )  # fmt: skip


def data_of(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, y = examples(case.data, case.labels, sum(case.sizes))
    return (x.to(dtype) if x.is_floating_point() else x), (
        y.to(dtype) if y.is_floating_point() else y
    )


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert a module in place; unlike `Module.to`, keep shared buffers shared."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype)
    floating = [(b, b.to(dtype)) for b in module.buffers() if b.is_floating_point()]
    for each in module.modules():
        for name, buffer in each._buffers.items():
            for before, after in floating:
                if buffer is before:
                    each._buffers[name] = after
    return module


def task_of(case: Case, dtype: torch.dtype) -> Task:
    x, y = data_of(case, dtype)
    objective = ModuleObjective(
        lambda: cast(case.build(), dtype), case.loss, classifies=case.labels in ("classes", "each")
    )
    train = Federation({"x": x, "y": y}, np.cumsum([0, *case.sizes]))
    return Task("zoo", objective, train, local_of(recipe_of(case)))


def run(case: Case, dtype: torch.dtype, engine: str, **more: Any) -> tuple[Task, Record]:
    """Train for three rounds, evaluating each (which must change nothing); the last record."""
    task, recipe = task_of(case, dtype), recipe_of(case)
    weighting = "size" if recipe.weigh else "uniform"
    options: dict[str, Any] = {"engine": engine, "weighting": weighting, **more}
    rounds = fx.simulate(
        task, algorithm_of(recipe), ROUNDS, COHORT, SEED, evaluate_every=1, **options
    )
    return task, list(rounds)[-1]


@cache
def by_loop(name: str, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    more = {} if device == "cpu" else {"device": device, "precision": "float32"}
    return outcome(*run(BY_NAME[name], dtype, "loop", **more))


@cache
def by_reference(name: str, dtype: torch.dtype) -> Outcome:
    """The same run in plain torch, from the same weights and with the same batches."""
    case, recipe = BY_NAME[name], recipe_of(BY_NAME[name])
    x, y = data_of(case, dtype)
    local = local_of(recipe)
    problem = Problem(
        worker=initial(case, dtype),
        loss=case.loss or cross_entropy,
        clients=list(zip(x.split(case.sizes), y.split(case.sizes), strict=True)),
        cohorts=[
            sample_cohort(SEED, r, len(case.sizes), COHORT).tolist() for r in range(1, ROUNDS + 1)
        ],
        batches=lambda r, i: [b.tolist() for b in plan_batches(SEED, r, i, case.sizes[i], local)],
        draws=lambda r, i: seeded_torch(SEED, "layers", r, i),
    )
    return train(problem, recipe)


def initial(case: Case, dtype: torch.dtype) -> nn.Module:
    """Build the model under the run's seed; frozen weights are those of the first one built."""
    with seeded_torch(0, "scratch"):
        first = dict(case.build().named_parameters())
    with seeded_torch(SEED, "initial weights"):
        module = case.build()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if not weight.requires_grad:
                weight.copy_(first[name])
    return cast(module, dtype)


def outcome(task: Task, record: Record) -> Outcome:
    """The trained model of a record by name; the last iterate, not the output."""
    assert isinstance(task.objective, ModuleObjective)
    buffers = Buffers(*(value.cpu() for value in record.state.buffers))
    module = task.objective.load(record.state.params.cpu(), buffers)
    params = {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}
    named = module.named_buffers(remove_duplicate=False)  # a shared one may have been split
    averaged = {n: b.detach() for n, b in named if b.is_floating_point()}
    assert record.server_lr is not None, "every client was dropped"
    return Outcome(params, averaged, (record.server_lr,))


@dataclass(frozen=True)
class Gap:
    """How far two runs are apart: parameters by what they travelled, buffers by their norm."""

    params: float
    buffers: float


def gap(one: Outcome, other: Outcome, case: Case) -> Gap:
    start = {n: p.detach() for n, p in initial(case, torch.float64).named_parameters()}
    assert one.params.keys() == other.params.keys()
    assert one.buffers.keys() >= other.buffers.keys()
    travelled = _norm({n: p.double() - start[n] for n, p in other.params.items()})
    assert travelled > 1e-2, "the weights must move, else nothing is compared"
    held = _norm(_finite(other.buffers)) or 1.0
    return Gap(
        _norm(_difference(one.params, other.params)) / travelled,
        _norm(_difference(one.buffers, other.buffers)) / held,
    )


def _difference(one: Named, other: Named) -> Named:
    """Differences in float64; equal infinities (of a mask) are no difference."""
    pairs = {n: (one[n].double(), other[n].double()) for n in other}
    return {n: torch.where(a == b, 0.0, a - b) for n, (a, b) in pairs.items()}


def _finite(named: Named) -> Named:
    return {n: torch.where(v.isfinite(), v, 0).double() for n, v in named.items()}


def _norm(named: Named) -> float:
    return float(sum(value.square().sum() for value in named.values())) ** 0.5


def assert_as_exact(ours: Outcome, case: Case) -> None:
    """Assert that a float32 run is as near to the exact one as plain float32 arithmetic is."""
    if case.draws:  # in float64 it draws other numbers
        found, allowed = gap(ours, by_reference(case.name, torch.float32), case), Gap(1e-5, 1e-5)
    else:
        exact = by_reference(case.name, torch.float64)
        found = gap(ours, exact, case)
        plain = gap(by_reference(case.name, torch.float32), exact, case)
        # lucky cancellation must not make rounding of the weights themselves an error
        least = 2**-23 * _norm({n: v.double() for n, v in exact.params.items()})
        least = max(least, 2**-23)
        allowed = Gap(ROUNDING * max(plain.params, least), ROUNDING * max(plain.buffers, least))
    assert found.params <= allowed.params
    assert found.buffers <= allowed.buffers


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


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("case", [case for case in CASES if case.batched], ids=case_id)
def test_a_gpu_batches_what_can_be_batched(case: Case) -> None:
    """By `auto`, in float64 to the loop's numbers; noise of bf16 is no alarm."""
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
