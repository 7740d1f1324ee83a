"""Differential privacy: clipping, noise, a step size corrected for noise, and accounting.

Works on `Aggregate`s, with Flower or without; `fedexp[privacy]` installs the accounting library.
"""

from fedexp.clipping import clip
from fedexp.privacy.accounting import (
    BudgetSpentError,
    Ledger,
    Release,
    Releases,
    Sampling,
    composed_epsilon,
    epsilon,
    noise_multiplier,
)
from fedexp.privacy.mechanism import (
    CentralMechanism,
    LocalMechanism,
    Mechanism,
    Numerator,
    best_norm_weight,
    joint_sensitivity,
    normals,
    seeded_normals,
    system_normals,
)
from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy, Privacy, PrivacyWarning

__all__ = [
    "BudgetSpentError",
    "CentralMechanism",
    "CentralPrivacy",
    "Ledger",
    "LocalMechanism",
    "LocalPrivacy",
    "Mechanism",
    "Numerator",
    "Privacy",
    "PrivacyWarning",
    "Release",
    "Releases",
    "Sampling",
    "best_norm_weight",
    "clip",
    "composed_epsilon",
    "epsilon",
    "joint_sensitivity",
    "noise_multiplier",
    "normals",
    "seeded_normals",
    "system_normals",
]
