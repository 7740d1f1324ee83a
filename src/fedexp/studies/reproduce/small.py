"""What stands in for the paper's tasks at `--scale small`: a CPU does it in minutes."""

from __future__ import annotations

from dataclasses import dataclass

from fedexp.tasks.small import (
    BATCH,
    CLIENTS,
    COHORT,
    STEPS,
    TEST_IMAGES,
    TRAIN_IMAGES,
    WRITERS,
)


@dataclass(frozen=True)
class Small:
    """The task that is run instead, and what is smaller about it.

    Attributes:
        task: its name.
        meaning: how it differs from the paper's.
        cohort: clients a round, 0 for all; None for the task's own number.
    """

    task: str
    meaning: str
    cohort: int | None = None


_LOCAL = f"{STEPS} local steps of batches of {BATCH}"
_IMAGES = f"{TRAIN_IMAGES:,} training and {TEST_IMAGES:,} test images"
_CNN = (
    f"a small CNN instead of ResNet-18, {_IMAGES}, {COHORT} of {CLIENTS} clients a round, {_LOCAL}"
)

SMALL = {
    "emnist": Small(
        "emnist-small",
        f"{WRITERS} writers, {TEST_IMAGES:,} test images, {COHORT} clients a round, {_LOCAL}",
    ),
    "cifar10": Small("cifar10-small", _CNN),
    "cifar100": Small("cifar100-small", _CNN),
    "cinic10": Small("cinic10-small", _CNN),
    "cifar10-cnn": Small("cifar10-small", f"{_IMAGES}, {_LOCAL}", cohort=0),
}
