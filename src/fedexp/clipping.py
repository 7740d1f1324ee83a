"""Clipping relative to the median: no client counts for more than `bound` times the others.

FedExP divides a mean of squared norms by the square of a mean, so one long update sets the step.
With `Algorithm(bound=2)` every update is clipped to twice the median norm, in the mean and in the
mean squared norm alike; so are changes of buffers, control variates, and weights. An honest
majority decides the median, and it follows norms that fall as training converges.

A clip must be known before updates are summed, so the median is that of the round before; the first
round is computed twice, once for its norms. What the server learns of norms is a sum as well, how
many there are in each of `BINS` bins, so neither the order of replies nor the number of processes
matters, and memory does not grow with the cohort.

Where the server may not see norms (secure aggregation, central privacy), each client adds one bit,
whether its update is longer than the median so far, and the median follows the mean of the bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate, norms, usable
from fedexp.precision import widest

PER_OCTAVE = 16  # bins per factor of two: norms are known within 4.4 %
BINS = 128 * PER_OCTAVE  # from 2^-64 to 2^64
UPDATE, WEIGHT, BUFFERS = "Δ", "p", "buffers"  # what is clipped, beside a rule's extras
COUNTS, CLIPPED = "norms of ", "clipped"  # names of extras, which have no weights
LONGER = "longer than the median"  # of the extra of bits
RATE = 0.1  # by which a median that follows bits changes per round, at most (Andrew et al., 2021)
MEDIAN = "median of "  # names in the state of the server, of each value that is clipped
BELOW = 1.0 - 2.0**-22  # so that rounding to float32 does not raise a clipped norm above the bound


def clip(updates: Tensor, bound: float) -> Tensor:
    """Scale updates [d] or [M, d] down to norm `bound`; shorter ones are unchanged to the bit.

    Updates that are not finite stay so, for `Aggregate.of` to leave out.

    >>> clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).norm(dim=1)
    tensor([1.0000, 0.5000])
    """
    rows = updates if updates.ndim == 2 else updates[None]
    return _clipped(rows, norms(rows), bound).view_as(updates)


def _clipped(rows: Tensor, lengths: Tensor, bound: Tensor | float) -> Tensor:
    factor = torch.where(lengths > bound, bound / lengths * BELOW, 1.0)
    return rows * factor[:, None].to(rows.dtype)


class Limits(NamedTuple):
    """What clients are clipped to in a round.

    Attributes:
        bound: in medians.
        medians: of each value that is clipped, see `clipped_values`; 0 where one is not known.
    """

    bound: float
    medians: Mapping[str, float]

    @property
    def are_known(self) -> bool:
        """Whether there is a median of every value; without, nothing is clipped."""
        return all(self.medians.values())


def clipped_sums(
    deltas: Tensor, weights: Any, extras: Mapping[str, Tensor], limits: Limits
) -> Aggregate:
    """Return the sums of M clients, each value clipped, with the counts of their norms.

    The clip of a client that weighs more than the median is shorter by the same factor, so that
    its weight times its norm is at most `bound` medians.

    Args:
        deltas: updates [M, d].
        weights: [M]; uniform when None.
        extras: further values to sum, [M, ...] each.
        limits: of this round.
    """
    good, total = usable(deltas, extras), widest(deltas.device)
    values = {**extras, UPDATE: deltas, WEIGHT: torch.ones_like(good, dtype=total)}
    if weights is not None:
        values[WEIGHT] = torch.as_tensor(weights, dtype=total, device=deltas.device)
    heavy = values[WEIGHT] / (limits.medians[WEIGHT] or math.inf)
    counts, over = dict[str, Tensor](), torch.zeros_like(good)
    for name, median in limits.medians.items():
        rows = values[name].flatten(1) if values[name].ndim > 1 else values[name][:, None]
        lengths = norms(rows)
        shorter = torch.ones_like(heavy) if name == WEIGHT else heavy.clamp(1.0, limits.bound)
        most = (limits.bound * median or math.inf) / shorter
        counts[COUNTS + name] = histogram(lengths[good])
        values[name] = _clipped(rows, lengths, most).view_as(values[name])
        over |= lengths > most
    counts[CLIPPED] = (over & good).sum(dtype=total)
    deltas = torch.where(good[:, None], values.pop(UPDATE), math.nan)  # one that is not is left out
    sums = Aggregate.of(deltas, values.pop(WEIGHT), values)
    return replace(sums, extras={**sums.extras, **counts})


def clipped_values(extras: Mapping[str, Tensor], params: Tensor, has_buffers: bool) -> list[str]:
    """Return the names of what is clipped: updates, weights, changes of buffers, and those extras
    of the client rule that are as long as the parameters (control variates)."""
    vectors = [name for name, value in extras.items() if value.shape == params.shape]
    return [UPDATE, WEIGHT, *([BUFFERS] if has_buffers else []), *vectors]


def histogram(lengths: Tensor) -> Tensor:
    """Return how many norms are in each bin, [BINS]; zero is in the first one.

    >>> histogram(torch.tensor([1.0, 1.01, 0.0]))[[0, BINS // 2]].tolist()
    [1.0, 2.0]
    """
    places = (lengths.log2() * PER_OCTAVE + BINS // 2).floor().clamp(0, BINS - 1).long()
    return torch.bincount(places, minlength=BINS).to(widest(lengths.device))


def median(counts: Tensor) -> Tensor:
    """Return the (lower) median of norms from their counts, or up to 4.4 % more; 0 for none.

    >>> round(median(histogram(torch.tensor([0.5, 3.0, 1e6]))).item(), 1)
    3.1
    """
    reached = counts.cumsum(0) >= (counts.sum() / 2).clamp(min=1.0)
    return torch.where(reached.any(), _end(reached.int().argmax()), 0.0)


def longest(counts: Tensor) -> Tensor:
    """Return the largest norm, or up to 4.4 % more; 0 where there are none."""
    places = torch.arange(BINS, device=counts.device)
    return torch.where(counts.any(), _end((places * (counts > 0)).max()), 0.0)


def _end(place: Tensor) -> Tensor:
    """Return the upper end of a bin, so that equal clients are not clipped by a bound of 1."""
    return torch.exp2((place.to(widest(place.device)) - BINS // 2 + 1) / PER_OCTAVE)


def length_bits(updates: Tensor, median: float) -> Tensor:
    """Return +1 for each update [M, d] that is longer than the median, else -1; shape [M, 1]."""
    return torch.where(norms(updates) > median, 1.0, -1.0)[:, None]


def follow(median: float, mean_bit: Tensor) -> dict[str, Tensor]:
    """Return what a release of bits adds to the sums: the median after the round.

    It grows where most updates are longer: m exp(0.2 (share - 1/2)), the adaptive clipping of
    Andrew et al. (2021) for the quantile 1/2, with the share of longer ones as a mean bit.
    """
    after = median * (RATE * mean_bit.clamp(-1.0, 1.0)).exp()
    return {MEDIAN + UPDATE: after.clamp(min=2.0**-64)}  # 0 stands for one that is not known


Settings = TypeVar("Settings", bound=Any)


def at_median(settings: Settings, limits: Limits | None) -> Settings:
    """Return settings with their `clip` lowered to the bound, where there is one and a median."""
    if limits is None or not limits.medians[UPDATE]:
        return settings
    return replace(settings, clip=min(settings.clip, limits.bound * limits.medians[UPDATE]))


def split_medians(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state of a server rule, and the medians that are stored beside it."""
    medians = {name: value for name, value in state.items() if name.startswith(MEDIAN)}
    return {name: value for name, value in state.items() if name not in medians}, medians


def next_medians(state: Mapping[str, Tensor], aggregate: Aggregate) -> dict[str, Tensor]:
    """Return the medians of a state after a round; without clients they stay.

    They change by a factor of two per round at most, so that an attacker who is alone in a round,
    or in the majority of a small one, does not set the clip of the next. A median that follows bits
    is in the sums.
    """
    if MEDIAN + UPDATE in aggregate.extras:
        return {name: aggregate.extras.get(name, before) for name, before in state.items()}
    after = {}
    for name, before in state.items():
        value = median(aggregate.extras[COUNTS + name.removeprefix(MEDIAN)])
        near = torch.where(before > 0, value.clamp(before / 2, before * 2), value)
        after[name] = torch.where(value > 0, near, before)
    return after


def clip_metrics(aggregate: Aggregate) -> dict[str, Tensor]:
    """Return how many clients were clipped, and the median and longest norm of their updates.

    Nothing where the server sees no norms.
    """
    counts = aggregate.extras.get(COUNTS + UPDATE)
    if counts is None:
        return {}
    return {
        "clipped": aggregate.extras[CLIPPED],
        "median_norm": median(counts),
        "longest_norm": longest(counts),
    }
