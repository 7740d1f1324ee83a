"""The trial of an engine: it is trusted once it agreed with the loop on the user's own model.

Three small clients of unequal size, made of the cohort's own examples, take a few steps with a
short batch among them, from weights that are moved a little away from their start, in training mode
with dropout off, through the real loss, client rule, clipping and weight decay. What the engine
returns is compared with what the loop returns.

How far they may be apart follows from the arithmetic: four times the distance between the loop in
the precision of the run and the loop in a wider one. So noise of bf16 is no alarm, and an error of
a percent in float32 is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedexp.data.federation import Batch, Federation
from fedexp.engine.loop import Engine, Loop, Sums
from fedexp.engine.state import SimulationState
from fedexp.engine.work import Work
from fedexp.errors import FedExPError, UsageError
from fedexp.objective import Buffers, ModuleObjective, Objective
from fedexp.precision import Precision, arithmetic
from fedexp.seeding import seeded_torch, torch_seed

ALLOWED = 4  # times the distance between the loop and the loop in a wider precision
LEAST = 64  # units in the last place that two orders of a sum may differ by, whatever that distance
UNKNOWN = 1e-4  # allowed where a float32 model cannot be run in a wider precision
EXACT = 1e-9  # allowed in float64, beside which there is no wider one
MOVED = 0.05  # of the weights' root mean square: how far they are moved
STEP = 0.02  # of the weights' norm: how far the first step leads
CLIPPED = 0.95  # of the first gradient's norm: where clipping begins, if there is any
LARGE = 1_000_000  # parameters: such models take fewer steps on a CPU
# Attempts, until one leaves little enough to rounding: how many clients the examples come from,
# whether there is a short batch, how far weights are moved, how far a step leads.
ATTEMPTS = (
    (8, True, MOVED, STEP),
    (8, True, MOVED, STEP / 20),
    (1, True, MOVED, STEP / 20),
    (8, True, 0.0, STEP / 20),
    (8, False, MOVED, STEP),
    (8, False, 0.0, STEP / 20),
)
SENSITIVE: dict[Precision, float] = {"float32": 1e-3, "tf32": 0.02, "bf16": 0.1}

Named = dict[str, Tensor]


class DisagreesError(FedExPError):
    """An engine's result is not the loop's."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A small round, and what the loop makes of it.

    Attributes:
        work: the round; its objective is a copy, without dropout.
        state: where it starts.
        expected: the loop's sums and client states, by name.
        limit: how far any of them may be off, relative to its norm.
    """

    work: Work
    state: SimulationState
    expected: Named
    limit: float

    @classmethod
    def of(cls, work: Work, state: SimulationState, precision: Precision) -> Trial:
        """Run the loop twice; raises what the model raises where it cannot be tried.

        Not every model takes short batches, moved weights or steps of a given length, so some
        others are tried; the one that leaves the least to rounding is kept.
        """
        best: Trial | None = None
        failed: Exception = DisagreesError("the model gives no finite numbers for a few examples")
        for sources, short, moved, step in ATTEMPTS:
            try:
                small = _small_work(work, state, sources, short)
                small, start = _start(small, state, moved, step)
                expected = _outcome(Loop(), small, start)
                if all(value.isfinite().all() for value in expected.values()):
                    limit = _limit(small, start, expected, precision)
                    if best is None or limit < best.limit:
                        best = cls(small, start, expected, limit)
            except UsageError:
                raise
            except (RuntimeError, ValueError, IndexError) as error:
                failed = error
            if best is not None and best.limit <= SENSITIVE[precision]:
                break
        if best is None:
            raise failed
        return best

    def check(self, engine: Engine) -> float:
        """Return the largest error of an engine; raises `DisagreesError` beyond the limit."""
        found = _outcome(engine, self.work, self.state)
        errors = _distances(found, self.expected)
        worst = max(errors.values())
        if not worst <= self.limit:
            raise DisagreesError(
                f"{engine.name} is off by {worst:.1e} from the loop on a few examples, where "
                f"rounding explains {self.limit:.1e}"
                + (", because forward draws random numbers" if self.draws() else "")
            )
        return worst

    def draws(self) -> bool:
        """Return whether the loop's result depends on torch's generator, without any dropout."""
        other = replace(self.work, seed=self.work.seed + 1)
        one, two = (
            _gradient(self.state, each, self.first_batch(), each.seed)
            for each in (self.work, other)
        )
        return not torch.equal(one, two)

    def first_batch(self) -> Batch:
        """Return the first batch of the first client."""
        return next(iter(self.work.batches(0)))

    def check_layers(self) -> None:
        """Check what stacked layers need besides: no decision by values, the same evaluation."""
        objective, params = self.work.task.objective, self.state.params
        assert isinstance(objective, ModuleObjective)
        batch = self.first_batch()
        both = {name: torch.stack([value, value]) for name, value in batch.items()}
        valid = params.new_ones(2, len(batch["y"]))
        clients = objective.layered(params.repeat(2, 1), both, valid)
        with torch.no_grad(), NoDataDependence():  # type: ignore[no-untyped-call]
            outputs = clients.outputs(both["x"].flatten(0, 1)).to(params.dtype)
            clients.stack.losses(outputs, both["y"].flatten(0, 1))
        plain, by_layers = (self._measured(layers) for layers in (False, True))
        error = _distance(by_layers, plain)
        if not error <= self.limit:
            raise DisagreesError(f"evaluation by stacked layers is off by {error:.1e}")

    def _measured(self, layers: bool) -> Tensor:
        """Return the losses in evaluation mode, by stacked layers or not."""
        objective = self.work.task.objective
        assert isinstance(objective, ModuleObjective)
        objective.evaluates_layers = layers
        values = objective.measure(self.state.params, self.state.buffers, self.first_batch())
        return values["loss"].double()


class NoDataDependence(TorchDispatchMode):
    """Refuse operations whose result a program uses to decide what to do next.

    With the examples of all clients in one batch, such a decision would be one for all of them.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in DECIDING:
            raise DisagreesError(f"forward decides by values ({func})")
        return func(*args, **(kwargs or {}))


_AT = torch.ops.aten
DECIDING = {
    _AT._local_scalar_dense.default,
    _AT.nonzero.default,
    _AT.masked_select.default,
    _AT._unique2.default,
}


def _small_work(work: Work, state: SimulationState, sources: int, short: bool) -> Work:
    """Return the round of three small clients, with a short batch among their batches or not."""
    local, train = work.local, work.task.train
    objective = work.task.objective
    on_gpu = train.device.type == "cuda"
    largest = int(work.task.train.sizes[work.cohort].max())
    if local.batch_size is None:
        batch, sizes = None, (7, 7, 3) if short else (7, 7, 7)
    else:
        # on a GPU as wide as in the run, since kernels are chosen by their shapes
        batch = min(local.batch_size, largest if on_gpu else 4)
        rest = max(1, 3 * batch // 4) if short else batch
        sizes = (batch + rest, batch + rest, rest)
    examples = _examples(work, sources, sum(sizes))
    offsets = np.cumsum([0, *sizes])
    if isinstance(objective, ModuleObjective):
        objective = objective.copy(dropout=False)
    large = not on_gpu and state.params.numel() > LARGE
    few = replace(
        local,
        steps=2 if large else min(3, max(2, local.steps)),
        epochs=None if local.epochs is None else 1 if large else 2,
        batch_size=batch,
        lr_decay=1.0,
    )
    task = replace(
        work.task, train=Federation(examples, offsets, finite=True), test=None, objective=objective
    )
    return replace(work, task=task, local=few, weighting="size", round=1, cohort=np.arange(3))


def _examples(work: Work, sources: int, count: int) -> Batch:
    """Return examples of several clients, mixed, so that labels differ within a batch."""
    train, cohort = work.task.train, work.cohort
    chosen = cohort[np.linspace(0, len(cohort) - 1, min(sources, len(cohort))).astype(int)]
    each = math.ceil(count / len(chosen))
    parts = [train.batch(int(c), np.arange(each) % train.sizes[c]) for c in chosen]
    mixed = np.arange(each * len(chosen)).reshape(len(chosen), each).T.ravel()[:count]
    order = torch.from_numpy(mixed)
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def _start(
    work: Work, state: SimulationState, moved: float, step: float
) -> tuple[Work, SimulationState]:
    """Return where the small round starts, and its settings scaled to the gradient there.

    A step of the run's own size may lose all digits of the update, or blow up.
    """
    params, algorithm = state.params, work.algorithm
    generator = torch.Generator().manual_seed(torch_seed(work.seed, "trial"))

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    params = params + moved * params.square().mean().sqrt() * draw(params)
    start = SimulationState.of(params, state.buffers, algorithm)
    grad = _gradient(start, work, next(iter(work.batches(0))), work.seed)
    norm, size = grad.norm().item(), params.norm().item()
    local = work.local
    if norm and size and math.isfinite(norm):
        clip = None if local.clip_norm is None else CLIPPED * norm
        local = replace(local, lr=step * size / norm, clip_norm=clip)
    scale = norm / math.sqrt(params.numel()) if math.isfinite(norm) else 0.0

    def some(tensors: Mapping[str, Tensor]) -> Named:
        return {
            name: value + scale * draw(value) if value.is_floating_point() else value
            for name, value in tensors.items()
        }

    clients = {c: some(algorithm.client.init_local(params)) for c in range(3)}
    clients = clients if clients[0] else {}
    return replace(work, local=local), replace(start, shared=some(start.shared), clients=clients)


def _gradient(state: SimulationState, work: Work, batch: Batch, seed: int) -> Tensor:
    with seeded_torch(seed, "trial"):
        return work.task.objective.gradient(state.params.clone(), state.buffers, batch)[0]


def _outcome(engine: Engine, work: Work, state: SimulationState) -> Named:
    """Return everything that an engine gives back, by name; all of it in float64."""
    sums: Sums = engine(work, state)
    aggregate, clients = sums
    named = {"update": aggregate.mean, "squared norm": aggregate.mean_sq_norm}
    named |= {name: aggregate.mean_extra(name) for name in sorted(aggregate.extras)}
    if "buffers" in named:  # their values: changes alone may be nothing but rounding
        named["buffers"] = named["buffers"] + state.buffers.averaged.nan_to_num(0.0, 0.0, 0.0)
    for client, kept in sorted(clients.items()):
        named |= {f"state {name} of {client}": value for name, value in kept.items()}
    named["clients"] = aggregate.count
    return {name: value.detach().double() for name, value in named.items()}


def _distances(found: Named, expected: Named) -> dict[str, float]:
    """Return how far values are apart, relative to the expected ones."""
    if found.keys() != expected.keys():
        raise DisagreesError(
            f"it returns {sorted(found)} where the loop returns {sorted(expected)}"
        )
    return {name: _distance(found[name], value) for name, value in expected.items()}


def _distance(one: Tensor, other: Tensor) -> float:
    gap, size = (one - other).norm().item(), other.norm().item()
    gap = gap if math.isfinite(gap) else math.inf
    return gap / size if size else (math.inf if gap else 0.0)


def _limit(work: Work, state: SimulationState, expected: Named, precision: Precision) -> float:
    """Return how large an error rounding explains, relative to the norm of a value."""
    dtype = state.params.dtype
    if dtype == torch.float64:
        return EXACT
    narrow = {"bf16": 2.0**-8, "tf32": 2.0**-11, "float32": torch.finfo(dtype).eps}[precision]
    wider = _wider(work, state, torch.float64 if precision == "float32" else dtype)
    if wider is None:
        return max(UNKNOWN, LEAST * narrow)
    # the largest of all: a single number may be right by chance
    apart = max(_distances(expected, wider).values())
    return max(ALLOWED * apart, LEAST * torch.finfo(dtype).eps)


def _wider(work: Work, state: SimulationState, dtype: torch.dtype) -> Named | None:
    """Return the loop's outcome in a wider precision, None where the model knows no other."""
    objective = work.task.objective
    if not isinstance(objective, ModuleObjective):
        return None
    cast: Objective = _Cast(objective.copy(dtype))
    wide = replace(work, task=replace(work.task, objective=cast))

    def widen(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    start = replace(
        SimulationState.of(
            widen(state.params), Buffers(*map(widen, state.buffers)), work.algorithm
        ),
        shared={name: widen(value) for name, value in state.shared.items()},
        clients={
            c: {name: widen(value) for name, value in kept.items()}
            for c, kept in state.clients.items()
        },
    )
    try:
        with arithmetic("float32"):
            found = _outcome(Loop(), wide, start)
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if all(value.isfinite().all() for value in found.values()) else None


@dataclass(frozen=True, eq=False)
class _Cast:
    """An objective that converts the examples to the type of the parameters."""

    objective: ModuleObjective

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return self.objective.initial(seed)

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        return self.objective.gradient(params, buffers, self._cast(params, batch))

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return self.objective.measure(params, buffers, self._cast(params, batch))

    def _cast(self, params: Tensor, batch: Batch) -> Batch:
        return {n: v.to(params.dtype) if v.is_floating_point() else v for n, v in batch.items()}
