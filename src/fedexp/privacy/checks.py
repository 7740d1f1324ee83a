"""What cannot be promised is refused; what promises less than it seems to is warned about."""

from __future__ import annotations

import math
import warnings

import torch

from fedexp.algorithms import Algorithm
from fedexp.errors import require
from fedexp.privacy import accounting


class PrivacyWarning(UserWarning):
    """The privacy settings promise less than they seem to."""


def check_numbers(
    clip: float, delta: float, noise_multiplier: float | None, epsilon: float | None
) -> None:
    require(
        math.isfinite(clip) and clip > 0,
        f"clip must be positive and finite, not {clip}; try the median norm of the updates",
    )
    require(
        (noise_multiplier is None) != (epsilon is None), "give either noise_multiplier or epsilon"
    )
    accounting.require_delta(delta)
    if noise_multiplier is not None:
        accounting.require_noise(noise_multiplier)
    if epsilon is not None:
        accounting.require_epsilon(epsilon)


def check_fit(algorithm: Algorithm, weighting: str, buffers: bool) -> None:
    """Refuse what the guarantee would not cover."""
    require(
        weighting == "uniform",
        f"privacy bounds what a client adds only with uniform weights, not {weighting}; "
        "leave weighting out",
    )
    require(
        not algorithm.client.init_shared(torch.zeros(1)),
        f"the control variates of {algorithm.name} are not covered by privacy; "
        "take a rule without them, such as fedexp or fedprox-exp",
    )
    require(
        not buffers,
        "the model's averaged buffers (BatchNorm statistics) are not covered by privacy; "
        "use a model with GroupNorm or none",
    )


def warn_weak(delta: float, clients: int) -> None:
    if delta >= 1.0 / clients:
        warnings.warn(
            f"delta = {delta} is not below 1 / {clients} clients: it allows to publish one of "
            f"them whole; take at most {0.1 / clients:.0e}",
            PrivacyWarning,
            stacklevel=3,
        )
