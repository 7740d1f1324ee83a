"""`RawSplits`: a data set as it was published, before it is given to clients."""

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
    """Training and test examples of images: the fields `x` and `y`.

    `x` holds bytes (examples, channels, rows, columns) and `y` the labels as int64.

    Attributes:
        name: what the data set is called on the command line.
        classes: number of labels; they are 0 to classes - 1.
        train: training examples, in the order of the files.
        test: test examples.
        offsets: where each natural client's training examples begin, for a data set that has
            natural clients: client i owns the rows offsets[i] to offsets[i + 1].
    """

    name: str
    classes: int
    train: Batch
    test: Batch
    offsets: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, name: str, classes: int, arrays: Mapping[str, NDArray[Any]]) -> RawSplits:
        """Wrap the arrays of a cache file without copying them."""
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
        """The training examples given to clients: by a partition, or to their natural clients.

        Natural clients stay in the cache file and are not copied; a partition is copied once.
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
        arrays: what a cache file holds, by name.
        splits: the splits that must be there, e.g. train and test.
        natural: whether the offsets of natural clients must be there as well.
    """
    for split in splits:
        x, y = (arrays.get(f"{split}_{field}", np.empty(())) for field in ("x", "y"))
        good = x.ndim == 4 and x.dtype == np.uint8 and y.dtype == np.int64
        require(good and y.shape == x.shape[:1], f"it does not hold the {split} images and labels")
    require(not natural or "offsets" in arrays, "it does not say which client has which examples")


def check_labels(labels: NDArray[Any], classes: int, where: object) -> NDArray[np.int64]:
    """The labels as int64, if all of them are whole numbers from 0 to classes - 1."""
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(f"{where}: labels are not a list of whole numbers")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise UsageError(
            f"{where}: label {labels[wrong[0]]} of example {wrong[0]} is out of range; "
            f"labels are 0 to {classes - 1}"
        )
    return labels.astype(np.int64)
