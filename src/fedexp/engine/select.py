"""Selection of the engine: the requested one, or the fastest that suits the work.

An engine other than the loop is used only after it agreed with the loop on the user's own model
(`trial.py`). `select_engine` returns the engine with the reason for it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import numpy as np
import torch

from fedexp.engine.base import Engine
from fedexp.engine.batched import COHORT_BYTES, Batched, Implementation
from fedexp.engine.dense import Dense, dense_network_of
from fedexp.engine.loop import Loop
from fedexp.engine.plan import Numbers, Work, client_steps, step_lengths
from fedexp.engine.quadratic import Quadratic, suits_quadratic
from fedexp.engine.state import EngineChoice, SimulationState
from fedexp.engine.threads import Threads, check_draws
from fedexp.engine.trial import Trials
from fedexp.errors import EngineWarning, UsageError, first_line, require
from fedexp.local import LocalTraining
from fedexp.objective import (
    BatchedObjective,
    CopyableObjective,
    StackedObjective,
)
from fedexp.precision import Precision

if TYPE_CHECKING:
    from fedexp.engine.programs import SharedPrograms

log = logging.getLogger("fedexp")
SMALL_MODEL = 100_000  # parameters; below, most of the time is the interpreter's, in one thread
EngineName = Literal["auto", "loop", "threads", "batched", "dense", "quadratic"]
"""Names of engines; "auto" selects the fastest that agrees with the loop on the task's model."""
ENGINES: tuple[str, ...] = get_args(EngineName)
AGREES = "it agrees with the loop on a few examples"
AGREED = "an earlier run of this process has shown that it agrees with the loop on a few examples"
MOST_PADDING = 4.0  # computing this many times too much costs what batching gains
# On a CPU (decision note 23): clients in a step from which batching is faster than the loop, and
# parameters times padding at which it is as slow.
LEAST_CLIENTS = {"layers": 2, "vmap": 5}
PADDED_WEIGHTS = 50_000


class Selected(NamedTuple):
    """An engine, and why it was selected, in one line.

    `make` returns another one for a check; None where there is nothing to check.
    """

    engine: Engine
    reason: str
    make: Callable[[Work], Engine] | None = None

    @property
    def choice(self) -> EngineChoice:
        """The engine as a record stores it; the CUDA graph is known once a round is over."""
        if isinstance(self.engine, Batched):
            variant, graph = self.engine.variant, self.engine.cuda_graph
            return EngineChoice("batched", self.reason, variant, graph)
        return EngineChoice(self.engine.name, self.reason)


@dataclass(frozen=True)
class Candidate:
    """An engine that may run the work.

    Attributes:
        reason: why it suits.
        make: returns it for a round's work.
        make_tried: returns it for the trial, without what takes long to prepare; None for `make`.
        layers: whether it replaces the model's layers by stacked ones.
        draws: whether dropout in training mode must be checked besides.
        variant: distinguishes candidates that have the same reason.
    """

    reason: str
    make: Callable[[Work], Engine]
    make_tried: Callable[[Work], Engine] | None = None
    layers: bool = False
    draws: bool = False
    variant: str = ""


def check_engine_name(name: str) -> EngineName:
    """Return the name of an engine; refuse an unknown one."""
    require(name in ENGINES, f"engine is one of {', '.join(ENGINES)}, not {name!r}")
    return name  # type: ignore[return-value]


def select_engine(
    name: EngineName,
    work: Work,
    state: SimulationState,
    precision: Precision = "float32",
    programs: SharedPrograms | None = None,
) -> Selected:
    """Return the engine to use, and why.

    "auto" solves quadratic problems in closed form, has a separate engine for plain dense
    networks on a CPU, batches other models wherever that was measured to pay (on a GPU always),
    unless clients are so unequal that most of the work would be padding or, on a CPU, a step would
    train too few of them, and gives large models on a CPU a thread per client. It times nothing, so
    that the same run takes the same engine every time and gives the same bits. Where an engine
    disagrees with the loop or cannot run the model, the next one is tried, and a warning gives the
    reason; the loop is the last.

    Args:
        name: "auto", or the engine that must run; `UsageError` where it cannot.
        work: the first round.
        state: the state before it.
        precision: of the run.
        programs: what earlier runs of this process have prepared: trials that need not be made
            again, and engines; `programs.prepared` returns the task for a selected engine.
    """
    if name == "loop":
        return Selected(Loop(), "asked for by name")
    failure = "this engine does not suit the model, the rule, the local optimiser or the device"
    is_usage_error = False
    candidates, trials = _candidates(name, work, state), Trials(work, state, precision)
    for candidate in candidates:
        make = candidate.make_tried or candidate.make
        try:
            key = None
            if programs is not None:
                names = candidate.reason, candidate.variant
                key = programs.trial_key(names, work, state, precision)
            has_agreed = programs is not None and programs.has_agreed(key)
            if not has_agreed:
                log.info("trying an engine: %s", candidate.reason)
                trials.check(make, candidate.layers)
                if candidate.draws:
                    objective = cast(CopyableObjective, work.task.objective)
                    check_draws(objective, state, trials.batch())
            asked = "auto" if name == "auto" else "asked for by name"
            reason = f"{asked}: {candidate.reason}; {AGREED if has_agreed else AGREES}"
            if programs is None:
                return Selected(candidate.make(work), reason, make)
            programs.note_agreement(key, tried=not has_agreed)
            engine = programs.engine(key, candidate.make, candidate.layers, work)
            return Selected(engine, reason, make)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch.func refuses models with errors of many types
            failure, is_usage_error = first_line(error), isinstance(error, UsageError)
    if is_usage_error and name != "auto":
        raise UsageError(failure)
    if name != "auto":
        raise UsageError(f"engine {name!r} cannot be used: {failure}; use engine='loop'")
    if not candidates:
        return Selected(Loop(), "auto: no other engine is faster for this model and device")
    # the loop raises a usage error too; not every model has layers to be stacked
    if not is_usage_error and not all(candidate.layers for candidate in candidates):
        warnings.warn(f"clients run one after another: {failure}", EngineWarning, stacklevel=4)
    return Selected(Loop(), f"auto: no faster engine can be used: {failure}")


def _candidates(name: EngineName, work: Work, state: SimulationState) -> list[Candidate]:
    """Return the engines that may run the work, best first; for "auto" those that pay."""
    auto, objective = name == "auto", work.task.objective
    candidates: list[Candidate] = []
    if state.params.device.type == "mps":
        return []
    if name in ("auto", "quadratic") and suits_quadratic(work, state):
        reason = "least squares on whole batches on a CPU"
        candidates.append(Candidate(reason, lambda _: Quadratic()))
    if name in ("auto", "dense") and (dense := dense_network_of(work, state)) is not None:
        candidates.append(Candidate("a plain dense classifier on a CPU", lambda _: Dense(dense)))
    by_name = not callable(work.local.optimizer)
    if (
        isinstance(objective, BatchedObjective)
        and by_name
        and (
            name == "batched"
            or (auto and not candidates and _batching_pays(objective, work, state))
        )
    ):
        candidates += _batched(objective, work, state, auto)
    if isinstance(objective, CopyableObjective) and (
        name == "threads" or (auto and _threads_pay(work, state))
    ):
        reason = "every client is trained by one thread on a CPU"
        candidates.append(Candidate(reason, _threads, draws=True))
    return candidates


def _threads_pay(work: Work, state: SimulationState) -> bool:
    """Return whether clients gain by threads: a large model on a CPU with several cores."""
    return (
        state.params.device.type == "cpu"
        and state.params.numel() >= SMALL_MODEL
        and min(torch.get_num_threads(), len(work.cohort)) > 1
    )


def _threads(work: Work) -> Engine:
    return Threads(cast(CopyableObjective, work.task.objective))


def _batched(
    objective: BatchedObjective, work: Work, state: SimulationState, auto: bool
) -> list[Candidate]:
    """Return the implementations of the batched engine, the fastest first, or all that pay."""
    variants: list[tuple[Implementation, bool]] = [("vmap", True), ("vmap", False)]
    if isinstance(objective, StackedObjective):
        if objective.mixes_examples():
            variants = [("vmap", False)]
        elif (
            work.local.is_plain_sgd
            and work.algorithm.client.is_linear
            and objective.has_stacked_layers()
        ):
            variants = [("layers", True), *variants]
    device = state.params.device.type
    if auto and device == "cpu":
        sizes = _typical_sizes(work, state)
        variants = [
            (implementation, padded)
            for implementation, padded in variants
            if _clients_per_step(sizes, work.local, padded) >= LEAST_CLIENTS[implementation]
        ]
    return [_batched_candidate(*variant, device) for variant in variants]


def _batched_candidate(implementation: Implementation, padded: bool, device: str) -> Candidate:
    def make(work: Work) -> Engine:
        objective = work.task.objective
        if layers and isinstance(objective, StackedObjective):
            objective.evaluate_stacked(device == "cuda")
        return Batched(implementation, padded)

    layers = implementation == "layers"
    how = "every layer has a stacked implementation" if layers else "vmap batches the gradient"
    return Candidate(
        f"clients are trained together on {device}, {how}",
        make,
        lambda _: Batched(implementation, padded, graphs=False),
        layers,
        variant=f"{implementation}, {padded}",
    )


def _batching_pays(objective: BatchedObjective, work: Work, state: SimulationState) -> bool:
    """Return whether the objective gains by batching, and clients are alike enough to be padded."""
    if not objective.batching_pays(state.params.device):
        return False
    if 2 * state.params.nbytes > COHORT_BYTES.get(state.params.device.type, 0):
        return False  # one client at a time is not a batch
    is_on_cpu = state.params.device.type == "cpu"
    sizes = _typical_sizes(work, state) if is_on_cpu else work.task.train.sizes[work.cohort]
    widths = np.minimum(sizes, work.local.batch_size or sizes.max())
    steps = client_steps(sizes, work.local)
    padded, most = len(sizes) * widths.max() * steps.max(), MOST_PADDING
    if is_on_cpu:  # the weights of clients that wait are read and written too
        most = min(most, max(1.25, PADDED_WEIGHTS / state.params.numel()))
    elif state.params.is_cuda and isinstance(objective, StackedObjective):
        most = len(sizes) if objective.has_sequence_layers() else most
    return bool(padded <= most * (widths * steps).sum())


def _typical_sizes(work: Work, state: SimulationState) -> Numbers:
    """Return the sizes of clients that are trained together, [K], at equal distances among all.

    Those of the smallest and the largest client are among them, whoever is in the first cohort.
    """
    together = COHORT_BYTES[state.params.device.type] // state.params.nbytes
    sizes = np.sort(work.task.train.sizes)
    at = np.linspace(0, len(sizes) - 1, min(len(work.cohort), max(1, together)))
    return sizes[at.round().astype(np.int64)]


def _clients_per_step(sizes: Numbers, local: LocalTraining, padded: bool) -> float:
    """Return how many clients a step of the batched engine trains, in the mean over its steps.

    Padded, all take part in each until the one with the most steps is done; otherwise those whose
    batches are equally long.
    """
    lengths = step_lengths(sizes, local)
    ordered = np.sort(lengths, axis=1)
    groups = (ordered[:, 0] > 0).sum() + (np.diff(ordered, axis=1) > 0).sum()
    return float((lengths > 0).sum() / (len(lengths) if padded else groups))
