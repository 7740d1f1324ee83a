"""What the engines share: the protocol of an engine, and the sums of trained clients.

A cohort is summed in parts, so that memory does not grow with it; client states are stacked for
engines that train several clients at once; a pool has the threads of one operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregate import WEIGHT_OF, Aggregate, usable
from fedexp.client import LinearCorrection, Tensors
from fedexp.clipping import clipped_sums
from fedexp.engine.client_store import ClientStates
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.local import kept_state
from fedexp.objective import Buffers, Objective, buffer_changes
from fedexp.precision import widest
from fedexp.tasks.task import Task

SUMMED_BYTES = 32 * 2**20  # updates held at a time; one, where one is larger
EVALUATED_ROWS = 1000  # examples of a client that are evaluated together

Sums = tuple[Aggregate, dict[int, Tensors]]
Run = Callable[[Work, SimulationState], Sums]


class Engine(Protocol):
    """Trains the clients of a round.

    Attributes:
        name: as in `engine=`, and in brackets which of its implementations runs.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        """Train every client of the cohort; return the sums and the new client states."""
        ...


class RoundResult(NamedTuple):
    """A round that is over: the state after it, its numbers, and the changed client states."""

    state: SimulationState
    clients: int
    dropped: int
    metrics: dict[str, float]
    changed: dict[int, Tensors]


class Trained(NamedTuple):
    """The result of a client: its update, its extras in the sums, its new state.

    `weight_factor` is that of the client rule.
    """

    delta: Tensor
    extras: Tensors
    state: Tensors
    weight_factor: Tensor | float | None = None


def cohort_parts(work: Work, state: SimulationState, least: int = 1) -> list[list[int]]:
    """Return the cohort in parts whose updates are summed at a time, in multiples of `least`.

    Their updates take `SUMMED_BYTES` at most, so that memory does not grow with the cohort. Where
    only one client counts, the others are left out.
    """
    clients: list[int] = work.cohort.tolist() if work.only is None else [work.only]
    together = SUMMED_BYTES // (state.params.numel() * state.params.element_size())
    together = max(least, together - together % least)
    return [clients[at : at + together] for at in range(0, len(clients), together)]


def add_sums(one: Sums, other: Sums) -> Sums:
    """Return the sums of the clients of both."""
    return one[0] + other[0], {**one[1], **other[1]}


def sum_trained(
    work: Work, clients: list[int], trained: list[Trained], deltas: Tensor | None = None
) -> Sums:
    """Return the sums of trained clients; one whose update is not finite changes no state.

    `deltas` [K, d] are their updates, where `train` has written them to one matrix.
    """
    if deltas is None:
        deltas = torch.stack([one.delta for one in trained])
    extras = {
        name: torch.stack([one.extras[name] for one in trained]) for name in trained[0].extras
    }
    factors = [float(one.weight_factor) for one in trained if one.weight_factor is not None]
    if factors and "buffers" in extras:
        extras |= buffer_extras(extras["buffers"], deltas.new_tensor(factors)[:, None])
    weights = client_weights(work, clients, factors or None)
    states: dict[int, Tensors] = {}
    if trained[0].state:
        good = usable(deltas, extras).tolist()
        states = {c: one.state for c, one, ok in zip(clients, trained, good, strict=True) if ok}
    return _summed(work, clients, deltas, weights, extras), states


def sum_updates(
    work: Work,
    state: SimulationState,
    clients: list[int],
    deltas: Tensor,
    total_lr: Tensor | float,
    client_state: Tensors,
    buffers: Tensor | None = None,
    moments: Tensors | None = None,
) -> Sums:
    """Return the sums of clients that were trained together.

    Args:
        work: the round.
        state: the state before it.
        clients: K of its clients.
        deltas: their updates, [K, d].
        total_lr: steps times learning rate, of each client [K, 1] or of all.
        client_state: their rule's states before the round, [K, ...] each.
        buffers: the averaged buffers after local training, [K, b], if any.
        moments: the states of their optimisers after it, [K, ...] each, where they are kept.
    """
    rule = work.algorithm.client
    new_states, extras = rule.end_round(deltas, total_lr, state.broadcast, client_state)
    new_states = {**new_states, **kept_state(moments or {})}
    if rule.needs_loss:
        losses = [
            client_loss(
                work.task,
                client,
                work.task.objective,
                state.params - deltas[k],
                state.buffers if buffers is None else state.buffers._replace(averaged=buffers[k]),
            )
            for k, client in enumerate(clients)
        ]
        extras = {**extras, **rule.loss_extras(torch.stack(losses), deltas)}
    factor = rule.weight_factor(total_lr)
    if buffers is not None and buffers.numel():
        changes = buffer_changes(buffers, state.buffers.averaged)
        extras = {**extras, **buffer_extras(changes, factor)}
    factors = factor.flatten().tolist() if isinstance(factor, Tensor) else factor
    weights = client_weights(work, clients, factors)
    rows = unstacked(new_states, clients, usable(deltas, extras)) if new_states else {}
    # copies: views would hold the states of all the cohort in memory
    states: dict[int, Tensors] = {
        c: {name: value.clone() for name, value in row.items()} for c, row in rows.items()
    }
    return _summed(work, clients, deltas, weights, extras), states


def _summed(
    work: Work,
    clients: Sequence[int],
    deltas: Tensor,
    weights: Sequence[float] | None,
    extras: Tensors,
) -> Aggregate:
    """Return the sums of K clients, clipped (and noised) as the round asks for."""
    if work.privacy is not None:
        extras = {**extras, **work.privacy.bits(deltas)}
        deltas = work.privacy.protected(deltas, clients, work.round)
    if work.limits is not None:
        return clipped_sums(deltas, weights, extras, work.limits)
    return Aggregate.of(deltas, weights, extras)


def client_weights(
    work: Work, clients: Sequence[int], factor: Sequence[float] | float | None
) -> list[float] | None:
    """Return the weights of K clients in the sums; None where all are 1.

    `factor` is the client rule's `weight_factor`, of each client or of all.
    """
    if factor is None and work.weighting == "uniform" and work.only is None:
        return None
    if not isinstance(factor, Sequence):
        factor = [1.0 if factor is None else factor] * len(clients)
    return [work.weight(client) * each for client, each in zip(clients, factor, strict=True)]


def buffer_extras(changes: Tensor, factor: Tensor | float | None) -> dict[str, Tensor]:
    """Return the extras of K clients for the mean of their buffer changes [K, b], weighted by p_i.

    `factor` is the client rule's `weight_factor`, [K, 1] or one for all. It multiplies p_i in all
    sums; for buffers it is divided out again.
    """
    if factor is None:
        return {"buffers": changes}
    inverse = torch.ones_like(changes[:, :1]) / factor
    inverse = torch.where(inverse.isfinite(), inverse, 0.0).to(changes.dtype)  # factor 0: in no sum
    return {"buffers": changes * inverse, f"{WEIGHT_OF}buffers": inverse}


def client_loss(
    task: Task, client: int, objective: Objective, params: Tensor, buffers: Buffers
) -> Tensor:
    """Return F_i of a model on all of the client's data, in evaluation mode, shape [1]."""
    sums, parts, size = [], [], int(task.train.sizes[client])
    for start in range(0, size, EVALUATED_ROWS):
        rows = np.arange(start, min(start + EVALUATED_ROWS, size))
        batch = task.train.batch(client, rows)
        part = task.parts(batch).get("loss")
        parts.append(len(rows) if part is None else float(part.sum()))
        if task.transform is not None:
            batch = dict(task.transform.evaluate(batch))
        losses = objective.measure(params, buffers, batch)["loss"]
        sums.append(losses.sum(dtype=widest(losses.device)))
    total = torch.stack(sums).sum(dim=0, keepdim=True)
    return total if task.sums else total / sum(parts)


def stacked_states(work: Work, state: SimulationState, clients: Sequence[int]) -> dict[str, Tensor]:
    """Return the states of some clients, [K, ...] each; initial ones before their first round."""
    initial = work.init_client_state(state.params)
    return ClientStates.of(state.clients).stacked(clients, initial)


def part_of(correction: LinearCorrection, own: slice | Tensor) -> LinearCorrection:
    """Return the correction of some clients; an offset [d] is common to all."""
    if correction.offset is None or correction.offset.ndim == 1:
        return correction
    return correction._replace(offset=correction.offset[own])


def unstacked(states: Tensors, clients: Sequence[int], good: Tensor) -> dict[int, Tensors]:
    """Return views of the states [K, ...] by client, of those whose updates count."""
    return {
        client: {name: value[k] for name, value in states.items()}
        for k, (client, ok) in enumerate(zip(clients, good.tolist(), strict=True))
        if ok
    }


T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """As many threads as torch would use for one operation; each runs its operations alone."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Return the results for all items, in their order."""
        if self.count == 1:
            return list(map(function, items))
        (results,) = self.map_parts(function, [items])
        return results

    def map_parts(
        self, function: Callable[[T], R], parts: Iterable[Sequence[T]]
    ) -> Iterator[list[R]]:
        """Yield the results of each part, in the order of its items.

        While the caller uses the results of a part, the threads work on the next one, so that
        results of two parts are in memory at a time.
        """
        if self.count == 1:
            yield from (list(map(function, items)) for items in parts)
            return
        before = torch.get_num_threads()
        # libraries have one setting for all threads, of which the last assignment counts
        torch.set_num_threads(1)
        submitted: deque[list[Future[R]]] = deque()
        try:
            for items in parts:
                submitted.append([self._threads.submit(function, item) for item in items])
                if len(submitted) > 1:
                    yield [future.result() for future in submitted[0]]
                    submitted.popleft()
            while submitted:
                yield [future.result() for future in submitted[0]]
                submitted.popleft()
        finally:
            left = [future for part in submitted for future in part if not future.cancel()]
            wait(left)
            torch.set_num_threads(before)
