"""What `Federation` refuses, in one line, so that no example is ever lost without a word."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fedexp.data import Federation
from fedexp.data.sources import cache
from fedexp.errors import UsageError

X = np.arange(8.0).reshape(4, 2)
Y = np.arange(4)
FIELDS = {"x": X, "y": Y}
TENSORS = {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}


def refused(action: Callable[[], object], *said: str) -> None:
    with pytest.raises(UsageError) as caught:
        action()
    assert "\n" not in str(caught.value)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_every_example_needs_an_id(count: int) -> None:
    refused(lambda: Federation.from_ids(FIELDS, ["a"] * count), f"{count} ids for 4 examples")


UNLIKE = {"x": torch.zeros(4, 2), "y": torch.zeros(3)}
LENGTHS = "fields differ in length: 'x' has 4 rows, 'y' has 3 rows"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Federation(UNLIKE, np.array([0, 3])),
        lambda: Federation.from_ids(UNLIKE, [0, 0, 0]),
        lambda: Federation.from_parts(UNLIKE, [np.arange(3)]),
    ],
)
def test_fields_of_different_lengths_are_named(make: Callable[[], Federation]) -> None:
    refused(make, LENGTHS)


ROWS: dict[str, tuple[list[Any], str]] = {
    "negative": ([[0, 1], [-1]], "client 1 is given row -1, but rows are 0"),
    "out of range": ([[0, 1], [2, 4]], "client 1 is given row 4, but rows are 0 to 3"),
    "fractions": ([[0, 1], [2.0]], "the rows of client 1 are float64, not whole numbers"),
    "a mask": ([[True, False, True, True]], "the rows of client 0 are bool"),
    "text": ([["0"]], "the rows of client 0 are <U1"),
    "a number": ([[0], 1], "the rows of client 1 are not a list"),
    "ragged": ([[[0], [1, 2]]], "the rows of client 0 are not a list"),
    "twice at a client": ([[0], [1, 3, 1]], "row 1 is given to client 1 and again to client 1"),
    "twice": ([[0, 3], [1], [2, 3]], "row 3 is given to client 0 and again to client 2"),
    "nobody": ([], "at least one client"),
    "nothing": ([[0], []], "client 1 has no examples"),
}


@pytest.mark.parametrize("what", ROWS)
def test_rows_that_are_none_are_refused(what: str) -> None:
    parts, said = ROWS[what]
    refused(lambda: Federation.from_parts(FIELDS, parts), said)
    dataset = TensorDataset(*TENSORS.values())
    refused(lambda: Federation.from_torch_dataset(dataset, parts), said)


class WithoutLength:
    """A data set that does not say how many examples it has."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (X[index], Y[index])


def test_a_dataset_without_a_length() -> None:
    take = Federation.from_torch_dataset
    assert take(WithoutLength(), [np.array([3]), np.array([0])]).sizes.tolist() == [1, 1]
    refused(
        lambda: take(WithoutLength(), [np.array([2**60])]), "has no example 1152921504606846976"
    )
    refused(lambda: take(WithoutLength(), [np.array([-1])]), "row -1, but rows are 0 and up")
    refused(lambda: take(WithoutLength(), [np.array([1, 1])]), "row 1 is given to client 0 and")
    refused(lambda: take(WithoutLength(), [np.array([0])], ["x"]), "2 entries, but 1 are named")


def test_examples_that_would_lose_their_fractions_are_refused() -> None:
    mixed: Any = [(np.zeros(2), 1), (np.zeros(2), 0.5)]
    refused(
        lambda: Federation.from_torch_dataset(mixed, [np.arange(2)]),
        "field 'y' of example 1 is float32, not int64 as the first",
    )


class Short(list[Any]):
    """A partition that has fewer examples than it says."""

    def __len__(self) -> int:
        return 3


class OnePartition:
    num_partitions = 1

    def load_partition(self, index: int) -> Short:
        return Short([{"img": X[0], "label": 0}])


def test_partitions_must_have_what_they_say() -> None:
    refused(lambda: Federation.from_flower(OnePartition()), "has 3 examples, but gives 1")


OFFSETS: dict[str, tuple[dict[str, Tensor], Any, str]] = {
    "no fields": ({}, np.array([0]), "at least one client"),
    "no fields for clients": ({}, np.array([0, 4]), "at least one field"),
    "no clients": (TENSORS, np.array([0]), "at least one client"),
    "no offsets": (TENSORS, np.array([], np.int64), "at least one client"),
    "a late start": (TENSORS, np.array([1, 4]), "offsets must begin with 0, not 1"),
    "too few": (TENSORS, np.array([0, 3]), "own 3 rows, but 'x' has 4 rows, 'y' has 4 rows"),
    "too many": (TENSORS, np.array([0, 5]), "own 5 rows, but 'x' has 4 rows, 'y' has 4 rows"),
    "an empty client": (TENSORS, np.array([0, 2, 2, 4]), "client 1 has no examples"),
    "backwards": (TENSORS, np.array([0, 3, 2, 4]), "client 1 has no examples"),
    "fractions": (TENSORS, np.array([0.0, 4.0]), "whole numbers"),
    "a list": (TENSORS, [0, 4], "offsets must be an array"),
    "a table": (TENSORS, np.array([[0, 4]]), "offsets must be an array"),
    "a number": ({"x": torch.tensor(3.0)}, np.array([0, 1]), "'x' is a single number"),
    "no tensor": ({"x": X}, np.array([0, 4]), "'x' must be a tensor"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("what", OFFSETS)
def test_offsets_that_fit_nothing_are_refused(what: str) -> None:
    fields, offsets, said = OFFSETS[what]
    refused(lambda: Federation(fields, offsets), said)


def test_a_saved_file_that_does_not_fit_is_named(tmp_path: Path) -> None:
    cache.write(tmp_path / "a.npz", {"x": X, "offsets": np.array([0, 9])})
    refused(lambda: Federation.open(tmp_path / "a.npz"), "a.npz: the clients own 9 rows")
    cache.write(tmp_path / "a.npz", {"x": np.array(["text"]), "offsets": np.array([0, 1])})
    refused(lambda: Federation.open(tmp_path / "a.npz"), "a.npz: field 'x' is not an array of num")


@pytest.mark.parametrize("value", [["a", "b"], [[1.0], [1.0, 2.0]], object()])
def test_fields_that_are_no_numbers_are_named(value: Any) -> None:
    refused(lambda: Federation.from_ids({"x": value}, [0, 1]), "'x' is not an array of numbers")


@pytest.mark.parametrize("index", [-1, 2])
def test_a_client_that_is_not_there(index: int) -> None:
    federation = Federation.from_ids(FIELDS, [0, 0, 1, 1])
    refused(lambda: federation.client(index), f"no client {index}; they are 0 to 1")


def test_parts_need_not_hold_every_example() -> None:
    made = Federation.from_parts(FIELDS, [[2], [0, 1]])  # type: ignore[list-item]
    assert made.fields["y"].tolist() == [2, 0, 1]
