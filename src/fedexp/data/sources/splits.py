"""`RawSplits`: the training and test examples of a published image data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedexp.data.federation import Batch, Federation
from fedexp.errors import UsageError, require


@dataclass(frozen=True, eq=False)
class RawSplits:
    """Training and test examples before partitioning: the fields `x` and `y`.

    `x` is uint8 [examples, channels, height, width] and `y` the int64 labels.

    Attributes:
        name: name of the data set on the command line.
        classes: number of classes; labels are 0 to classes - 1.
        train: training examples, in the order of the files.
        test: test examples.
        offsets: for a data set with natural clients, client i owns the training rows offsets[i] to
            offsets[i + 1]; else None.
    """

    name: str
    classes: int
    train: Batch
    test: Batch
    offsets: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, name: str, classes: int, arrays: Mapping[str, NDArray[Any]]) -> RawSplits:
        """Wrap the arrays of a cache file, without a copy."""
        check_arrays(arrays, ("train", "test"))
        for split in ("train", "test"):
            check_labels(arrays[f"{split}_y"], classes, f"the {split} images of {name}")
        train, test = (
            {field: torch.from_numpy(arrays[f"{split}_{field}"]) for field in ("x", "y")}
            for split in ("train", "test")
        )
        natural = np.array(arrays["offsets"]) if "offsets" in arrays else None
        return cls(name, classes, train, test, natural)

    def federation(self, parts: Sequence[NDArray[np.int64]] | None = None) -> Federation:
        """Return the training examples by client: by a partition, or by natural clients.

        Natural clients are memory-mapped from the cache file; a partition is copied once.
        """
        if parts is not None:
            return Federation.from_parts(self.train, parts)
        require(
            self.offsets is not None,
            f"{self.name} has no natural clients; give a partition, e.g. one of "
            "fedexp.data.partition.dirichlet",
        )
        assert self.offsets is not None
        return Federation(self.train, self.offsets)


def check_arrays(
    arrays: Mapping[str, NDArray[Any]], splits: Sequence[str], natural: bool = False
) -> None:
    """Refuse arrays that are not the images and labels of these splits.

    Args:
        arrays: the arrays of a cache file, by name.
        splits: required splits, e.g. train and test.
        natural: whether the offsets of natural clients are required.
    """
    for split in splits:
        x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
        good = x.ndim == 4 and x.dtype == np.uint8 and y.dtype == np.int64
        require(good and y.shape == x.shape[:1], f"it does not hold the {split} images and labels")
    require(not natural or "offsets" in arrays, "it does not hold the offsets of the clients")


def check_labels(labels: NDArray[Any], classes: int, where: object) -> NDArray[np.int64]:
    """Return the labels as int64; refuse any that is not an integer from 0 to classes - 1."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(f"{where}: labels are not a list of whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise UsageError(
            f"{where}: label {labels[wrong[0]]} of example {wrong[0]} is out of range; "
            f"labels are 0 to {classes - 1}"
        )
    return labels.astype(np.int64)
