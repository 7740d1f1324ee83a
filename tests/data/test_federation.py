"""`Federation`: its constructors, and the data that they refuse."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fedexp.data import Federation
from fedexp.data.sources import cache
from fedexp.errors import UsageError
from tests.helpers.errors import assert_refused


def some() -> Federation:
    x = np.arange(12, dtype=np.uint8).reshape(6, 2)
    return Federation.from_parts(
        {"x": x, "y": np.arange(6)}, [np.array([5]), np.array([0, 2]), np.array([1, 3, 4])]
    )


def same(one: Federation, other: Federation) -> bool:
    return one.offsets.tolist() == other.offsets.tolist() and all(
        torch.equal(one.fields[name], other.fields[name])
        and one.fields[name].dtype == other.fields[name].dtype
        for name in {*one.fields, *other.fields}
    )


def test_clients_are_contiguous() -> None:
    federation = some()
    assert federation.sizes.tolist() == [1, 2, 3]
    assert federation.fields["y"].tolist() == [5, 0, 2, 1, 3, 4]
    assert federation.client(1)["y"].tolist() == [0, 2]
    assert federation.batch(2, np.array([2, 0]))["y"].tolist() == [4, 1]


def test_uint8_is_preserved_and_a_client_is_a_view() -> None:
    federation = some()
    own = federation.client(1)["x"]
    assert own.dtype == torch.uint8
    assert own.untyped_storage().data_ptr() == federation.fields["x"].untyped_storage().data_ptr()


@given(ids=st.lists(st.sampled_from(["ann", "bob", "cy"]), min_size=1))
def test_from_ids_has_every_example_once_and_in_order(ids: list[str]) -> None:
    federation = Federation.from_ids({"row": np.arange(len(ids))}, ids)
    names = sorted(set(ids))
    assert federation.clients == len(names)
    for index, name in enumerate(names):
        own = [row for row, owner in enumerate(ids) if owner == name]
        assert federation.client(index)["row"].tolist() == own


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(UsageError, match="client 1 has no examples"):
        Federation.from_parts({"x": np.arange(3)}, [np.array([0]), np.array([], int)])


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UsageError, match="'x' holds values that are not finite"):
        Federation.from_ids({"x": [1.0, float("nan")]}, [0, 1])


def test_save_and_open_round_trip(tmp_path: Path) -> None:
    some().save(tmp_path / "clients.npz")
    back = Federation.open(tmp_path / "clients.npz")
    assert same(back, some())
    assert [path.name for path in tmp_path.iterdir()] == ["clients.npz"]


def test_open_refuses_other_files(tmp_path: Path) -> None:
    cache.write(tmp_path / "a.npz", {"x": np.arange(3)})
    with pytest.raises(UsageError, match="is not a saved federation"):
        Federation.open(tmp_path / "a.npz")
    with pytest.raises(UsageError, match="nowhere"):
        Federation.open(tmp_path / "nowhere.npz")


def test_from_torch_dataset() -> None:
    parts = [np.array([2]), np.array([0, 3])]
    x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    federation = Federation.from_torch_dataset(TensorDataset(x, y), parts)
    assert same(federation, Federation.from_parts({"x": x, "y": y}, parts))


class Images(Dataset[Any]):
    """Like a torchvision data set without transforms: a PIL image and an integer."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), index


def test_from_torch_dataset_of_images() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    parts = [np.array([2, 1]), np.array([0])]
    federation = Federation.from_torch_dataset(Images(pixels), parts, names=("image", "number"))
    assert federation.fields["image"].dtype == torch.uint8
    np.testing.assert_array_equal(
        federation.fields["image"], pixels[[2, 1, 0]].transpose(0, 3, 1, 2)
    )
    assert federation.fields["number"].tolist() == [2, 1, 0]
    assert federation.fields["number"].dtype == torch.int64


def test_examples_of_different_shapes_are_refused() -> None:
    ragged: Any = [(np.zeros(3), 0), (np.zeros(4), 0)]
    with pytest.raises(UsageError, match="'x' of example 1 has shape"):
        Federation.from_torch_dataset(ragged, [np.array([0, 1])])


class Partitioner:
    """The part of a Flower Datasets partitioner that is used."""

    def __init__(self, partitions: list[list[Mapping[str, Any]]]) -> None:
        self.partitions = partitions

    @property
    def num_partitions(self) -> int:
        return len(self.partitions)

    def load_partition(self, partition_id: int) -> list[Mapping[str, Any]]:
        return self.partitions[partition_id]


def test_from_flower() -> None:
    grey = [Image.fromarray(np.full((2, 2), i, np.uint8)) for i in range(3)]
    rows: list[Mapping[str, Any]] = [{"image": grey[i], "label": i, "who": "?"} for i in range(3)]
    partitioner = Partitioner([rows[:1], rows[1:]])
    federation = Federation.from_flower(partitioner, {"x": "image", "y": "label"})
    assert federation.sizes.tolist() == [1, 2]
    assert federation.fields["x"].shape == (3, 1, 2, 2)
    assert federation.client(1)["y"].tolist() == [1, 2]
    with pytest.raises(UsageError, match="no column 'img'; the data has image, label, who"):
        Federation.from_flower(partitioner)


def paint(path: Path, value: int, size: tuple[int, int] = (4, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def test_from_image_folder_with_one_folder_per_client(tmp_path: Path) -> None:
    paint(tmp_path / "bob" / "dog" / "1.png", 10)
    paint(tmp_path / "ann" / "dog" / "7.bmp", 20)
    paint(tmp_path / "ann" / "cat" / "2.PNG", 30)
    (tmp_path / "ann" / "notes.txt").write_text("not an image")
    federation = Federation.from_image_folder(tmp_path)
    assert federation.sizes.tolist() == [2, 1]  # ann, bob
    assert federation.fields["x"].shape == (3, 3, 4, 3)
    assert federation.fields["x"][:, 0, 0, 0].tolist() == [30, 20, 10]
    assert federation.fields["y"].tolist() == [0, 1, 1]  # cat, dog


def test_from_image_folder_with_a_function(tmp_path: Path) -> None:
    paint(tmp_path / "cat" / "bob-1.png", 1)
    paint(tmp_path / "dog" / "ann-1.png", 2, size=(8, 8))
    federation = Federation.from_image_folder(
        tmp_path,
        client=lambda path: path.stem.split("-")[0],
        classes=("dog", "ape", "cat"),
        size=(5, 6),
        mode="L",
    )
    assert federation.fields["x"].shape == (2, 1, 5, 6)
    assert federation.fields["x"][:, 0, 0, 0].tolist() == [2, 1]
    assert federation.fields["y"].tolist() == [0, 2]


def test_from_image_folder_names_the_problem(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        Federation.from_image_folder(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="holds no images"):
        Federation.from_image_folder(tmp_path)
    paint(tmp_path / "cat" / "1.png", 1)
    with pytest.raises(UsageError, match="give client as a function"):
        Federation.from_image_folder(tmp_path)
    with pytest.raises(UsageError, match="unknown class folder"):
        Federation.from_image_folder(tmp_path, client=str, classes=["cow"])
    paint(tmp_path / "cat" / "2.png", 1, size=(9, 9))
    with pytest.raises(UsageError, match=r"2\.png: is 9x9 pixels, not 4x3"):
        Federation.from_image_folder(tmp_path, client=str)
    (tmp_path / "cat" / "1.png").write_text("no image")
    with pytest.raises(UsageError, match=r"1\.png: not an image"):
        Federation.from_image_folder(tmp_path, client=str)


X = np.arange(8.0).reshape(4, 2)
Y = np.arange(4)
FIELDS = {"x": X, "y": Y}
TENSORS = {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)}


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_every_example_needs_an_id(count: int) -> None:
    assert_refused(
        lambda: Federation.from_ids(FIELDS, ["a"] * count), f"{count} ids for 4 examples"
    )


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
    assert_refused(make, LENGTHS)


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
    "no clients": ([], "at least one client"),
    "nothing": ([[0], []], "client 1 has no examples"),
}


@pytest.mark.parametrize("what", ROWS)
def test_invalid_rows_are_refused(what: str) -> None:
    parts, message = ROWS[what]
    assert_refused(lambda: Federation.from_parts(FIELDS, parts), message)
    dataset = TensorDataset(*TENSORS.values())
    assert_refused(lambda: Federation.from_torch_dataset(dataset, parts), message)


class WithoutLength:
    """A data set without `__len__`."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (X[index], Y[index])


def test_a_data_set_without_length() -> None:
    take = Federation.from_torch_dataset
    assert take(WithoutLength(), [np.array([3]), np.array([0])]).sizes.tolist() == [1, 1]
    assert_refused(
        lambda: take(WithoutLength(), [np.array([2**60])]), "has no example 1152921504606846976"
    )
    assert_refused(lambda: take(WithoutLength(), [np.array([-1])]), "row -1, but rows are 0 and up")
    assert_refused(
        lambda: take(WithoutLength(), [np.array([1, 1])]), "row 1 is given to client 0 and"
    )
    assert_refused(
        lambda: take(WithoutLength(), [np.array([0])], ["x"]), "2 entries, but 1 are named"
    )


def test_examples_that_would_be_truncated_are_refused() -> None:
    mixed: Any = [(np.zeros(2), 1), (np.zeros(2), 0.5)]
    assert_refused(
        lambda: Federation.from_torch_dataset(mixed, [np.arange(2)]),
        "field 'y' of example 1 is float32, not int64 as the first",
    )
    wider: Any = [(np.zeros(2, np.uint8), 1), (np.full(2, 4000, np.uint16), 1)]
    assert_refused(
        lambda: Federation.from_torch_dataset(wider, [np.arange(2)]),
        "field 'x' of example 1 is uint16, not uint8 as the first; give all examples one type",
    )


def test_data_sets_without_an_index_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    for dataset in (Stream(), None, DataLoader(TensorDataset(torch.zeros(2, 1)))):
        assert_refused(
            partial(Federation.from_torch_dataset, dataset, [np.arange(2)]), "has no examples by"
        )
    half = TensorDataset(torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2))
    assert Federation.from_torch_dataset(half, [np.arange(2)]).fields["x"].dtype == torch.float32


def test_masked_values_and_complex_nan_are_refused() -> None:
    masked = np.ma.array([[1.0, -999.0]] * 2, mask=[[False, True]] * 2)
    missing = np.array([[np.nan + 0j]] * 2)
    for x, message in ((masked, "masked; fill or drop them"), (missing, "that are not finite")):
        assert_refused(partial(Federation.from_ids, {"x": x}, [0, 1]), message)
    whole = Federation.from_ids({"x": np.ma.array([[1.0], [2.0]])}, [0, 1])
    assert whole.fields["x"].flatten().tolist() == [1.0, 2.0]


class Short(list[Any]):
    """A partition with fewer examples than its length."""

    def __len__(self) -> int:
        return 3


class OnePartition:
    num_partitions = 1

    def load_partition(self, index: int) -> Short:
        return Short([{"img": X[0], "label": 0}])


def test_partitions_must_have_their_length() -> None:
    assert_refused(
        lambda: Federation.from_flower(OnePartition()), "to have 3 examples, but yields 1"
    )


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
def test_invalid_offsets_are_refused(what: str) -> None:
    fields, offsets, message = OFFSETS[what]
    assert_refused(lambda: Federation(fields, offsets), message)


def test_an_inconsistent_saved_file_is_named(tmp_path: Path) -> None:
    cache.write(tmp_path / "a.npz", {"x": X, "offsets": np.array([0, 9])})
    assert_refused(lambda: Federation.open(tmp_path / "a.npz"), "a.npz: the clients own 9 rows")
    cache.write(tmp_path / "a.npz", {"x": np.array(["text"]), "offsets": np.array([0, 1])})
    assert_refused(
        lambda: Federation.open(tmp_path / "a.npz"), "a.npz: field 'x' is not an array of num"
    )


@pytest.mark.parametrize("value", [["a", "b"], [[1.0], [1.0, 2.0]], object()])
def test_fields_without_numbers_are_named(value: Any) -> None:
    assert_refused(
        lambda: Federation.from_ids({"x": value}, [0, 1]), "'x' is not an array of numbers"
    )


@pytest.mark.parametrize("index", [-1, 2, 0.5, "a"])
def test_an_unknown_client_is_refused(index: Any) -> None:
    federation = Federation.from_ids(FIELDS, [0, 0, 1, 1])
    assert_refused(lambda: federation.client(index), f"no client {index!r}; clients are 0 to 1")


def test_parts_may_leave_examples_out() -> None:
    federation = Federation.from_parts(FIELDS, [[2], [0, 1]])  # type: ignore[list-item]
    assert federation.fields["y"].tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("ids", "line"),
    [
        (np.array([np.nan, 1, np.nan, 2]), "2 ids are NaN; drop these rows"),
        (np.array(["a", None, "b", "a"], object), "1 id is None; drop this row"),
        (np.array(["a", np.nan, "b", "a"], object), "1 id is NaN; drop this row"),
        (["a", float("nan"), "b", "a"], "1 id is NaN; drop this row"),
        ([None] * 4, "4 ids are None; drop these rows"),
        (pd.Series(["a", pd.NA, "b", "a"]), "1 id is NaN; drop this row"),
        (pd.Series([1, None, 2, 2], dtype="Int64"), "1 id is NaN; drop this row"),
    ],
)
def test_missing_ids_are_no_client(ids: Any, line: str) -> None:
    assert_refused(lambda: Federation.from_ids({"x": X}, ids), line)


def test_columns_of_pandas_are_read_by_position() -> None:
    labels = pd.Series([3, 1, 2, 0], index=[9, 0, 2, 1])
    table = pd.DataFrame(X, index=labels.index)
    own = Federation.from_ids({"x": table, "y": labels}, [0, 0, 1, 1])
    assert own.fields["y"].tolist() == [3, 1, 2, 0]
    assert torch.equal(own.fields["x"], torch.as_tensor(X))


@pytest.mark.parametrize("parts", [5, None, (np.array([i]) for i in range(2)), {0: [0]}])
def test_parts_must_be_a_list(parts: Any) -> None:
    kind = type(parts).__name__
    assert_refused(lambda: Federation.from_parts({"x": X}, parts), f"parts is {kind}; give a list")


def test_other_objects_than_partitioners_are_refused() -> None:
    other: Any = object()
    assert_refused(lambda: Federation.from_flower(other), "the partitioner is object; give one")
