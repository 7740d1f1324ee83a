"""The numbers behind a release: how far one client reaches, and what noise leaves to rely on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedexp.aggregate import norms

MARGIN = 2.0  # standard deviations that the noise takes off the mean squared norm
BELOW = 1.0 - 2.0**-22  # rounding to float32 must not lift a clipped norm above the bound


def clip(updates: Tensor, bound: float) -> Tensor:
    """Scale updates down to norm `bound`, each as a whole; shorter ones stay to the bit.

    What is not finite stays so, for `Aggregate.of` to leave out.

    >>> clip(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).norm(dim=1)
    tensor([1.0000, 0.5000])
    """
    rows = updates if updates.ndim == 2 else updates[None]
    lengths = norms(rows)
    factor = torch.where(lengths > bound, bound / lengths * BELOW, 1.0)
    return (rows * factor[:, None].to(rows.dtype)).view_as(updates)


def joint_sensitivity(clip: float, norm_weight: float) -> float:
    """The largest norm of (Δ_i, κ ||Δ_i||² / C) over all updates within the clip C: C √(1 + κ²)."""
    return clip * math.sqrt(1.0 + norm_weight**2)


def best_norm_weight(noise_multiplier: float, cohort: int) -> float:
    """κ = 2 √(z / M): how loud the squared norms speak in the joint release.

    It minimises (1 + κ²)(1 + 16 z² / (κ² M²)): the variance that the scalar costs the update, times
    the one it keeps itself, relative to the square of a mean of C²/4 (updates of half the clip).

    >>> best_norm_weight(1.0, 100)
    0.2
    """
    return 2.0 * math.sqrt(noise_multiplier / cohort)


def lower_bound(sq_norm: Tensor, deviation: Tensor | float, most: Tensor | float) -> Tensor:
    """A sum of squared norms that noise of this deviation has hardly ever lifted, in [0, most].

    Cutting at 0 alone would leave the positive half of the noise, and a step size made of it.
    """
    honest = sq_norm - MARGIN * deviation
    return honest.clamp(min=0.0).minimum(torch.as_tensor(most).to(honest))
