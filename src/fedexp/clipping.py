"""Clipping relative to the median: no client counts for more than `bound` times the others.

FedExP divides a mean of squared norms by the square of a mean, so one long update sets the step.
With `Algorithm(bound=2)` every update is clipped to twice the median norm, in the mean and in the
mean squared norm alike; so are changes of buffers, control variates, and weights. An honest
majority decides the median, and it follows norms that fall as training converges.

A clip must be known before updates are summed, so the median is that of the round before; the first
round is computed twice, once for its norms. What the server learns of norms is a sum as well, how
many there are in each of `BINS` bins, so neither the order of replies nor the number of processes
matters, and memory does not grow with the cohort.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedexp.aggregate import Aggregate, norms, usable
from fedexp.precision import widest

PER_OCTAVE = 16  # bins per factor of two: norms are known within 2.2 %
BINS = 128 * PER_OCTAVE  # from 2^-64 to 2^64
UPDATE, WEIGHT, BUFFERS = "Δ", "p", "buffers"  # what is clipped, beside a rule's extras
COUNTS, CLIPPED = "norms of ", "clipped"  # names of extras, which have no weights
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


def _clipped(rows: Tensor, lengths: Tensor, bound: float) -> Tensor:
    factor = torch.where(lengths > bound, bound / lengths * BELOW, 1.0)
    return rows * factor[:, None].to(rows.dtype)


def clipped_sums(
    deltas: Tensor,
    weights: Any,
    extras: Mapping[str, Tensor],
    limits: Mapping[str, float],
) -> Aggregate:
    """Return the sums of M clients, each value clipped, with the counts of their norms.

    Args:
        deltas: updates [M, d].
        weights: [M]; uniform when None.
        extras: further values to sum, [M, ...] each.
        limits: the largest norm of each value that is clipped, see `clipped_values`.
    """
    good, total = usable(deltas, extras), widest(deltas.device)
    values = {**extras, UPDATE: deltas, WEIGHT: torch.ones_like(good, dtype=total)}
    if weights is not None:
        values[WEIGHT] = torch.as_tensor(weights, dtype=total, device=deltas.device)
    counts, over = dict[str, Tensor](), torch.zeros_like(good)
    for name, limit in limits.items():
        rows = values[name].flatten(1) if values[name].ndim > 1 else values[name][:, None]
        lengths = norms(rows)
        counts[COUNTS + name] = histogram(lengths[good])
        values[name] = _clipped(rows, lengths, limit).view_as(values[name])
        over |= lengths > limit
    counts[CLIPPED] = (over & good).sum(dtype=total)
    sums = Aggregate.of(values.pop(UPDATE), values.pop(WEIGHT), values)
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
    """Return the (lower) median of norms from their counts, up to 2.2 %; 0 where there are none.

    >>> round(median(histogram(torch.tensor([0.5, 3.0, 1e6]))).item(), 1)
    3.0
    """
    reached = counts.cumsum(0) >= (counts.sum() / 2).clamp(min=1.0)
    return torch.where(reached.any(), _middle(reached.int().argmax()), 0.0)


def longest(counts: Tensor) -> Tensor:
    """Return the largest norm, up to 2.2 %; 0 where there are none."""
    places = torch.arange(BINS, device=counts.device)
    return torch.where(counts.any(), _middle((places * (counts > 0)).max()), 0.0)


def _middle(place: Tensor) -> Tensor:
    """Return the (geometric) middle of a bin."""
    return torch.exp2((place.to(widest(place.device)) - BINS // 2 + 0.5) / PER_OCTAVE)


def split_medians(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the state of a server rule, and the medians that are stored beside it."""
    medians = {name: value for name, value in state.items() if name.startswith(MEDIAN)}
    return {name: value for name, value in state.items() if name not in medians}, medians


def next_medians(state: Mapping[str, Tensor], aggregate: Aggregate) -> dict[str, Tensor]:
    """Return the medians of a state after a round; without clients they stay.

    They change by a factor of two per round at most, so that an attacker who is alone in a round,
    or in the majority of a small one, does not set the clip of the next.
    """
    after = {}
    for name, before in state.items():
        value = median(aggregate.extras[COUNTS + name.removeprefix(MEDIAN)])
        near = torch.where(before > 0, value.clamp(before / 2, before * 2), value)
        after[name] = torch.where(value > 0, near, before)
    return after


def clip_metrics(aggregate: Aggregate) -> dict[str, Tensor]:
    """Return how many clients were clipped, and the median and longest norm of their updates."""
    counts = aggregate.extras[COUNTS + UPDATE]
    return {
        "clipped": aggregate.extras[CLIPPED],
        "median_norm": median(counts),
        "longest_norm": longest(counts),
    }
