"""Spot checks: in a few rounds of a run, one client is trained again by the loop.

The trial (`trial.py`) sees a few examples of the first cohort near the initial weights. A model
that combines examples only later, e.g. by a bound that activations have to reach first, passes it.
So in rounds that follow from the seed, a random client of the round is trained by the engine within
its cohort, once more and without dropout, and alone by the loop; the two updates are compared as in
the trial. The weights and draws of the run are not touched, and the rounds do not depend on time,
so resumed runs and all ranks make the same checks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedexp.engine.base import Engine
from fedexp.engine.plan import Work, step_lengths
from fedexp.engine.state import SimulationState
from fedexp.engine.trial import UNKNOWN, DisagreementError, Trial, unavoidable
from fedexp.errors import EngineError
from fedexp.objective import BatchedObjective, CopyableObjective
from fedexp.precision import Precision
from fedexp.seeding import generator, seeded_torch

EARLY = ((1, 4), (8, 32), (64, 256))  # a check in each of these ranges of rounds [begin, end)
PERIOD = 256  # and then one in each further range of so many rounds
# Parameters times examples of a round, and times the positions in an example that share parameters,
# below which a check takes a few hundredths of a second. Otherwise it may take a round of the
# engine and ten clients of the loop, so that one in every 50 + 500 / K rounds is a fiftieth of all.
SMALL_ROUND = 2e9
OPINIONS, NUDGE = 5, 0.01  # comparisons that must disagree, and the relative change of the weights

CPU = torch.device("cpu")

log = logging.getLogger("fedexp")


def spot_check(
    shard: Callable[[Work], Work],
    work: Work,
    state: SimulationState,
    precision: Precision,
    make: Callable[[Work], Engine],
) -> None:
    """Check a client in a few rounds; raise `EngineError` where the engine disagrees with the loop.

    Args:
        shard: returns the part of the round that this process trains; the process of the checked
            client makes the check.
        work: the round.
        state: the state before it.
        precision: of the run.
        make: returns an engine.
    """
    client = checked_client(work, state.params.numel())
    if client is None or client not in (part := shard(work)).cohort:
        return
    log.info("spot check: round %d, client %d", work.round, client)
    with seeded_torch(work.seed, "spot check", work.round):
        check_client(part, state, client, precision, make)


def checked_client(work: Work, params: int) -> int | None:
    """Return the client of a round that is checked, None in most rounds.

    It depends on the seed, the round and what local training computes, not on earlier rounds.
    """
    round, size = work.round, len(work.cohort)
    early = next((r for r in EARLY if r[0] <= round < r[1]), _range_of(round, PERIOD))
    rare = _range_of(round, math.ceil(50 + 500 / size))
    if round not in (_drawn(work.seed, early), _drawn(work.seed, rare)):
        return None
    examples = int(step_lengths(work.task.train.sizes[work.cohort], work.local).sum())
    chosen = early if params * examples * _positions(work) <= SMALL_ROUND else rare
    if round != _drawn(work.seed, chosen):
        return None
    return int(work.cohort[generator(work.seed, "checked client", round).integers(size)])


def _positions(work: Work) -> int:
    """Return how often an example uses a parameter at most: per token, or per pixel of an image."""
    objective = work.task.objective
    is_dense = isinstance(objective, BatchedObjective) and objective.batching_pays(CPU)
    inputs = [value[0] for value in work.task.train.fields.values()]
    widths = [x.shape[-1] if is_dense and x.ndim and x.is_floating_point() else 1 for x in inputs]
    return max(x.numel() // max(1, width) for x, width in zip(inputs, widths, strict=True))


def _range_of(round: int, length: int) -> tuple[int, int]:
    begin = round // length * length
    return begin, begin + length


@lru_cache(maxsize=8)
def _drawn(seed: int, bounds: tuple[int, int]) -> int | None:
    """Return the round of a range [begin, end) in which a check is made; None where it has 0."""
    begin, end = bounds
    return int(generator(seed, "spot check", begin, end).integers(begin, end)) if begin else None


def check_client(
    work: Work,
    state: SimulationState,
    client: int,
    precision: Precision,
    make: Callable[[Work], Engine],
) -> None:
    """Raise `EngineError` where an engine's update of a client of the round is not the loop's.

    Where rounding changes the sign before a ReLU, correct updates differ by more than it explains
    elsewhere, so the check is repeated from slightly other weights: all comparisons must disagree,
    by more than `UNKNOWN`.
    """
    objective = work.task.objective
    if isinstance(objective, CopyableObjective):
        objective = objective.copy(dropout=False)
    task = replace(work.task, objective=objective, test=None)
    work, error = replace(work, task=task, only=client, privacy=None), None
    for draw in range(OPINIONS):
        start = replace(state, params=_nudged(work, state.params, draw)) if draw else state
        try:
            Trial(work, start, precision, unavoidable(start, precision)).check(make)
            return
        except torch.OutOfMemoryError:
            raise
        except DisagreementError as disagreement:
            error = disagreement
        except Exception:  # an update of zero, or what the round itself raises
            return
        if error.distance <= UNKNOWN:
            return
    assert error is not None
    raise EngineError(
        f"round {work.round}: the {make(work).name} engine gives client {client} an update that is "
        f"off by {error.distance:.1e} from the loop's, where rounding explains {error.limit:.1e}; "
        "does the model or the loss combine the examples of a batch? use engine='loop'"
    )


def _nudged(work: Work, params: Tensor, draw: int) -> Tensor:
    noise = generator(work.seed, "nudge", work.round, draw).standard_normal(len(params))
    width = params.square().mean().sqrt()
    return params + NUDGE * width * torch.from_numpy(noise).to(params)
