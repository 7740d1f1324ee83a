"""The trial of an engine: it is used once it agreed with the loop on the user's own model.

A few small clients of unequal size, with the cohort's own examples, take a few steps with a short
batch among them, from weights that are perturbed a little, in training mode with dropout off,
through the real loss, client rule, clipping and weight decay. The result of the engine is compared
with the result of the loop.

The tolerance follows from the arithmetic: four times the distance between the loop in the precision
of the run and the loop in a wider one. So the noise of bf16 passes, and an error of a percent in
float32 does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedexp.algorithms import Algorithm
from fedexp.data.federation import Batch, Federation
from fedexp.engine.base import Engine, Sums
from fedexp.engine.loop import Loop, train
from fedexp.engine.plan import Work, step_lengths
from fedexp.engine.state import SimulationState
from fedexp.errors import EngineError
from fedexp.kernels.launch import without_kernels
from fedexp.local import init_kept_state
from fedexp.objective import (
    Buffers,
    CopyableObjective,
    CountingObjective,
    Objective,
    StackedObjective,
    changed_buffers,
)
from fedexp.precision import Precision, arithmetic
from fedexp.seeding import seeded_torch, torch_seed

ALLOWED = 4  # times the distance between the loop and the loop in a wider precision
LEAST = 64  # units in the last place that two orders of a sum may differ by, whatever that distance
UNKNOWN = 1e-4  # allowed where a float32 model cannot be run in a wider precision
EXACT = 1e-9  # allowed in float64, which has no wider precision
PERTURBED = 0.05  # of the weights' root mean square: the size of their perturbation
STEP = 0.02  # of the weights' norm: the length of the first step
SMALL_STEP = STEP / 20
SENSITIVE = 1e-3  # agreement within a wider tolerance proves little
# Eight units in the last place: what kernels may differ by where one of them is more exact.
NARROW: dict[str, float] = {"tf32": 2.0**-8, "bf16": 2.0**-5}
GROSS, DRAWS = 0.05, 3  # errors that rounding never explains; perturbations to try
MOST_ROUNDING = 2.0**-5  # of parameters in half precision
HALF = (torch.float16, torch.bfloat16)
CLIPPED = 0.95  # of the first gradient's norm: the bound of clipping, if there is any
LARGE = 1_000_000  # parameters: such models take fewer steps
WORK = 2**22  # parameters times examples of a batch: smaller models see the batches of the run

Named = dict[str, Tensor]


class Attempt(NamedTuple):
    """How a trial is made.

    Attributes:
        sources: how many clients the examples come from.
        short: whether there is a short batch.
        perturbed: the relative size of the perturbation of the weights.
        step: the relative length of a step.
        draw: number of the random perturbation.
    """

    sources: int = 8
    short: bool = True
    perturbed: float = PERTURBED
    step: float = STEP
    draw: int = 0

    def is_weaker(self, other: Attempt) -> bool:
        """Return whether agreement in this one proves less than in another."""
        return self.short < other.short or self.perturbed < other.perturbed


ATTEMPTS = (
    Attempt(),
    Attempt(step=SMALL_STEP),
    Attempt(sources=1, step=SMALL_STEP),
    Attempt(perturbed=0.0, step=SMALL_STEP),
    Attempt(short=False),
    Attempt(short=False, perturbed=0.0, step=SMALL_STEP),
)


class DisagreementError(EngineError):
    """The result of an engine is farther from the loop's than rounding explains."""

    def __init__(self, engine: str, distance: float, limit: float) -> None:
        super().__init__(
            f"{engine} is off by {distance:.1e} from the loop on a few examples, where rounding "
            f"explains {limit:.1e}"
        )
        self.distance, self.limit = distance, limit


class Trials:
    """The trials of one run, made when they are needed.

    First in plain arithmetic, where an error of a thousandth shows. Not every model takes short
    batches, perturbed weights or steps of a given length, and where rounding explains too much,
    agreement proves little, so there may be several. Then in the precision of the run, on a GPU
    with batches as large as in the run, since kernels are chosen by both: that finds gross errors.
    """

    def __init__(self, work: Work, state: SimulationState, precision: Precision) -> None:
        self.work, self.state, self.precision = work, state, precision
        self._plain: dict[Attempt, Trial] = {}
        self._actual: list[Trial] = []
        self._attempts = list(ATTEMPTS)
        self._failed: Exception = EngineError("it gives no finite numbers for a few examples")

    def check(self, make: Callable[[Work], Engine], layers: bool = False) -> None:
        """Raise `EngineError` where an engine fails, or what the model raises in every trial.

        Args:
            make: returns the engine for a trial.
            layers: whether to check what stacked layers need besides.
        """
        for trial in self._plain_trials():
            distance = trial.check(make)
            if distance <= trial.least or trial.limit <= SENSITIVE:
                break
        else:
            if not self._plain:
                raise self._failed
            raise EngineError(
                "its agreement with the loop cannot be tested, since rounding explains "
                f"{trial.limit:.1e}"
            )
        if self._is_special:
            trial = self._check_actual(make)
        if layers:
            trial.check_layers()

    def _check_actual(self, make: Callable[[Work], Engine]) -> Trial:
        """Return the trial in the precision of the run in which an engine agrees with the loop.

        Where rounding changes the sign before a ReLU, or which of two values is the maximum, an
        error is small but exceeds its limit. Other perturbations of the weights are tried then.
        """
        for draw in range(DRAWS):
            if draw == len(self._actual):
                attempt = next(reversed(self._plain))._replace(step=SMALL_STEP, draw=draw)
                self._actual.append(self._trial(attempt))
            try:
                self._actual[draw].check(make)
                return self._actual[draw]
            except DisagreementError as error:
                if error.distance > GROSS or draw == DRAWS - 1:
                    raise
        raise AssertionError  # the loop returns or raises

    def _plain_trials(self) -> Iterator[Trial]:
        """Yield the trials in plain arithmetic, first those that were made for other engines."""
        yield from list(self._plain.values())
        while self._attempts:
            attempt = self._attempts.pop(0)
            if any(attempt.is_weaker(other) for other in self._plain):
                continue
            try:
                trial = self._trial(attempt, plain=True)
                finite = all(value.isfinite().all() for value in trial.expected.values())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a user's model raises on some examples
                self._failed = error
                continue
            if finite:
                self._plain[attempt] = trial
                yield trial

    def _trial(self, attempt: Attempt, plain: bool = False) -> Trial:
        """Return a trial on a few examples; in a plain one, parameters are float32 or wider."""
        state, precision = self.state, self.precision
        if plain:
            precision = "float32"
            if state.params.dtype not in (torch.float32, torch.float64):
                state = widened(state, self.work.algorithm, torch.float32)
        with arithmetic(precision):
            small = _small_work(self.work, state, plain, attempt)
            small, start = _start(small, state, attempt)
        return Trial(small, start, precision, unavoidable(start, self.precision), plain)

    @property
    def _is_special(self) -> bool:
        """Whether the arithmetic of the run differs from that of a plain trial."""
        params = self.state.params
        narrow = params.dtype not in (torch.float32, torch.float64)
        return params.is_cuda or self.precision != "float32" or narrow

    def batch(self) -> Batch:
        """Return a batch that the model has accepted."""
        return next(reversed(self._plain.values())).first_batch()


@dataclass(frozen=True, eq=False)
class Trial:
    """A small round, of which an engine's result is compared with the loop's.

    Attributes:
        work: the round; its objective is a copy, without dropout.
        state: the state before it.
        precision: of the arithmetic.
        least: an error that always passes (`unavoidable`).
        plain: whether custom kernels are off.
    """

    work: Work
    state: SimulationState
    precision: Precision
    least: float
    plain: bool = False

    @cached_property
    def expected(self) -> Named:
        """The loop's sums and client states, by name."""
        with arithmetic(self.precision):
            expected = _named(Loop()(self.work, self.state), self.work, self.state)
        if not expected["clients"]:
            raise EngineError("it gives no finite numbers for a few examples")
        if not expected["update"].any():
            raise EngineError(
                "the update is zero on a few examples, so that nothing can be compared"
            )
        return expected

    @cached_property
    def limit(self) -> float:
        """The error that rounding explains, relative to the norm of a value.

        `ALLOWED` times the distance to the loop in a wider precision. Where there is none, a small
        round has a fixed limit. A whole round of local training may amplify rounding by any factor:
        then it is the distance to the loop from weights that differ in the last place.
        """
        work, params = self.work, self.state.params
        is_double, objective, other = params.dtype == torch.float64, work.task.objective, None
        if not is_double and isinstance(objective, CopyableObjective):
            wide = torch.float64 if self.precision == "float32" else params.dtype
            cast: Objective = _Cast(objective.copy(wide))
            task = replace(work.task, objective=cast)
            with suppress(RuntimeError, TypeError, ValueError), arithmetic("float32"):
                state = widened(self.state, work.algorithm, wide)
                named = _named(Loop()(replace(work, task=task), state), work, state)
                other = named if all(v.isfinite().all() for v in named.values()) else None
        if other is None and work.only is None:
            return max(self.least, EXACT if is_double else UNKNOWN)
        if other is None:
            signs = torch.ones_like(params)
            signs[1::2] = -1
            moved = params * (1 + torch.finfo(params.dtype).eps * signs)
            with arithmetic(self.precision):
                state = replace(self.state, params=moved)
                other = _named(Loop()(work, state), work, state)
        # the largest of all: a single value may be right by chance
        return max(self.least, ALLOWED * max(_distances(self.expected, other).values()))

    def check(self, make: Callable[[Work], Engine]) -> float:
        """Return the distance of an engine from the loop; raises `EngineError` beyond the limit."""
        expected, engine, before = self.expected, make(self.work), torch.get_rng_state()
        without = self.plain and self.state.params.is_cuda
        with arithmetic(self.precision), without_kernels() if without else nullcontext():
            result = _named(engine(self.work, self.state), self.work, self.state)
        if not torch.equal(before, torch.get_rng_state()):
            torch.set_rng_state(before)
            raise EngineError("forward draws random numbers outside nn.Dropout layers")
        error = max(_distances(result, expected).values())
        if error > self.least and not self.repeats:
            raise EngineError(
                f"{engine.name} is off by {error:.1e} from the loop on a few examples, because "
                "forward draws random numbers outside dropout layers or depends on earlier calls"
            )
        if error <= self.least or error <= self.limit:
            return error
        raise DisagreementError(engine.name, error, self.limit)

    @cached_property
    def repeats(self) -> bool:
        """Whether a client's update is the same again, also with other random numbers."""
        objective, updates = self.work.task.objective, list[Tensor]()
        client = int(self.work.cohort[0]) if self.work.only is None else self.work.only
        with arithmetic(self.precision):
            for seed in (0, 1):
                with seeded_torch(seed, "trial"):
                    updates.append(train(self.work, self.state, client, objective).delta.double())
        return _distance(updates[0], updates[1]) <= max(self.least, SENSITIVE)

    def first_batch(self) -> Batch:
        """Return the first batch of the first client."""
        return next(iter(self.work.batches(0)))

    def check_layers(self) -> None:
        """Check that stacked layers evaluate alike and need no data-dependent control flow."""
        objective, state = self.work.task.objective, self.state
        assert isinstance(objective, StackedObjective)
        losses = []
        with arithmetic(self.precision):
            batch = self.first_batch()
            both = {name: torch.stack([value, value]) for name, value in batch.items()}
            clients = objective.stacked_clients(state.params, 2)
            with torch.no_grad(), NoDataDependence():
                clients.losses(both)
            for stacked in (False, True):
                objective.evaluate_stacked(stacked)
                values = objective.measure(state.params, state.buffers, batch)
                losses.append(values["loss"].double())
        error = _distance(losses[1], losses[0])
        if not (error <= self.least or error <= self.limit):
            raise EngineError(f"evaluation by stacked layers is off by {error:.1e}")


class NoDataDependence(TorchFunctionMode):
    """Raise on operations whose result controls the program.

    With the examples of all clients in one batch, such a branch would be taken for all of them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        by_mask = name == "__getitem__" and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else args[1:])
        )
        if name in TO_PYTHON or by_mask:
            raise EngineError(f"forward branches on values ({name})")
        return func(*args, **(kwargs or {}))


TO_PYTHON = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "nonzero", "masked_select", "unique", "unique_consecutive", "equal", "allclose", "bincount",
}  # fmt: skip


def _small_work(work: Work, state: SimulationState, plain: bool, attempt: Attempt) -> Work:
    """Return the work of a round of a few small clients."""
    local, train = work.local, work.task.train
    objective, on_gpu = work.task.objective, train.device.type == "cuda"
    large, lengths = state.params.numel() > LARGE, step_lengths(train.sizes[work.cohort], local)
    clients, batch = 2 if large else 3, int(lengths.max())
    if not on_gpu or plain:  # kernels of a GPU are chosen by the size of a batch
        few = 4 if on_gpu or not large else 2
        batch = min(batch, max(few, WORK // state.params.numel()))
    rest = max(1, 3 * batch // 4) if attempt.short else batch
    if rest == 1 and not (lengths == 1).any():
        rest = batch  # a model may need two examples, and have them in the run
    sizes = (batch + rest, batch + rest, rest)[-clients:]
    examples = _examples(work, attempt.sources, sum(sizes))
    if plain:
        examples = {
            n: v.to(state.params.dtype) if v.dtype in HALF else v for n, v in examples.items()
        }
    offsets = np.cumsum([0, *sizes])
    if isinstance(objective, CopyableObjective):
        objective = objective.copy(state.params.dtype if plain else None, dropout=False)
    shorter = replace(
        local,
        steps=local.steps and (2 if large else min(3, max(2, local.steps))),
        epochs=None if local.epochs is None else 1 if large else 2,
        batch_size=local.batch_size and batch,
        lr_decay=1.0,
        lr_schedule="constant",
        step_schedule_over="round",
        warmup_steps=min(local.warmup_steps, 2),
    )
    task = replace(
        work.task, train=Federation(examples, offsets, finite=True), test=None, objective=objective
    )
    return replace(
        work,
        task=task,
        local=shorter,
        weighting="size",
        round=1,
        cohort=np.arange(clients),
        cohort_rule=None,
    )


def _examples(work: Work, sources: int, count: int) -> Batch:
    """Return interleaved examples of several clients, so that labels differ within a batch."""
    train, cohort = work.task.train, work.cohort
    chosen = cohort[np.linspace(0, len(cohort) - 1, min(sources, len(cohort))).astype(int)]
    share = math.ceil(count / len(chosen))
    parts = [
        train.batch(int(c), np.linspace(0, train.sizes[c] - 1, share).astype(np.int64))
        for c in chosen
    ]
    mixed = np.arange(share * len(chosen)).reshape(len(chosen), share).T.ravel()[:count]
    order = torch.from_numpy(mixed)
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _start(work: Work, state: SimulationState, attempt: Attempt) -> tuple[Work, SimulationState]:
    """Return the small round with settings scaled to the gradient, and the state before it.

    A step of the run's own size may lose all digits of the update, or diverge.
    """
    params, algorithm = state.params, work.algorithm
    where = params.device if params.is_cuda else torch.device("cpu")
    numbers = () if attempt.draw == 0 else (attempt.draw,)
    generator = torch.Generator(where).manual_seed(torch_seed(work.seed, "trial", *numbers))

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=where).to(like)

    width = params.square().mean().sqrt().item() or 1.0  # all weights may be zero
    params = params + attempt.perturbed * width * draw(params)
    start = SimulationState.of(params, state.buffers, algorithm)
    batch = next(iter(work.batches(0)))
    with seeded_torch(work.seed, "trial"):
        grad, _ = work.task.objective.gradient(params.clone(), state.buffers, batch)
    norm, size = grad.norm().item(), params.norm().item()
    local = work.local
    if norm and size and math.isfinite(norm):
        clip = None if local.clip_norm is None else CLIPPED * norm
        # Adam's steps are as long as if every entry of the gradient were 1
        first = norm if local.optimizer == "sgd" else math.sqrt(params.numel())
        local = replace(local, lr=attempt.step * size / first, clip_norm=clip)
    scale = norm / math.sqrt(params.numel()) if math.isfinite(norm) else 0.0

    def perturbed(tensors: Mapping[str, Tensor]) -> Named:
        return {
            name: value + scale * draw(value) if value.is_floating_point() else value
            for name, value in tensors.items()
        }

    fresh, kept = algorithm.client.init_client_state(params), init_kept_state(params, local)
    clients = {c: {**perturbed(fresh), **kept} for c in work.cohort.tolist()}
    clients = clients if clients[0] else {}
    work = replace(work, local=local)
    start = replace(start, broadcast=perturbed(start.broadcast), clients=clients)
    if local.keep_state:  # those that a round leaves, since not all numbers are moments
        start = replace(start, clients=Loop()(work, start)[1])
    return work, start


def _named(sums: Sums, work: Work, state: SimulationState) -> Named:
    """Return the sums and client states of a round by name, in float64."""
    aggregate, clients = sums
    named = {"update": aggregate.mean, "squared norm": aggregate.mean_sq_norm}
    named |= {name: aggregate.mean_extra(name) for name in sorted(aggregate.extras)}
    if "buffers" in named:  # their values: changes alone may be pure rounding
        values = changed_buffers(state.buffers.averaged, named["buffers"])
        named["buffers"] = values.nan_to_num(0.0, 0.0, 0.0)
    for client, client_state in sorted(clients.items()):
        if work.only in (None, client):
            named |= {f"state {name} of {client}": value for name, value in client_state.items()}
    named["clients"] = aggregate.count if work.only is None else aggregate.weight.sign()
    return {name: value.detach().double() for name, value in named.items()}


def _distances(result: Named, expected: Named) -> dict[str, float]:
    """Return the distances of values from the expected ones, relative to these."""
    if result.keys() != expected.keys():
        raise EngineError(f"it returns {sorted(result)} where the loop returns {sorted(expected)}")
    return {name: _distance(result[name], value) for name, value in expected.items()}


def _distance(one: Tensor, other: Tensor) -> float:
    gap, size = (one - other).norm().item(), other.norm().item()
    gap = gap if math.isfinite(gap) else math.inf
    return gap / size if size else (math.inf if gap else 0.0)


def unavoidable(state: SimulationState, precision: Precision) -> float:
    """Return the error of other orders of addition, and in half precision of its own rounding."""
    other_orders = min(LEAST * torch.finfo(state.params.dtype).eps, MOST_ROUNDING)
    return max(other_orders, NARROW.get(precision, 0.0))


def widened(state: SimulationState, algorithm: Algorithm, dtype: torch.dtype) -> SimulationState:
    """Return the first state of a run, converted to another type."""

    def widen(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    clients = {
        client: {name: widen(value) for name, value in client_state.items()}
        for client, client_state in state.clients.items()
    }
    params, buffers = widen(state.params), Buffers(*map(widen, state.buffers))
    broadcast = {name: widen(value) for name, value in state.broadcast.items()}
    return replace(
        SimulationState.of(params, buffers, algorithm), broadcast=broadcast, clients=clients
    )


@dataclass(frozen=True, eq=False)
class _Cast:
    """An objective that converts the examples to the type of the parameters."""

    objective: Objective

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return self.objective.initial(seed)

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return self.objective.gradient(params, buffers, self._cast(params, batch))

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return self.objective.measure(params, buffers, self._cast(params, batch))

    def counted_parts(self, batch: Batch) -> dict[str, Tensor]:
        if not isinstance(self.objective, CountingObjective):
            return {}
        return self.objective.counted_parts(batch)

    def _cast(self, params: Tensor, batch: Batch) -> Batch:
        return {n: v.to(params.dtype) if v.is_floating_point() else v for n, v in batch.items()}
