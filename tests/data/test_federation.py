"""`Federation` and its constructors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from fedexp.data import Federation
from fedexp.errors import UsageError


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


def test_clients_lie_one_after_the_other() -> None:
    federation = some()
    assert federation.sizes.tolist() == [1, 2, 3]
    assert federation.fields["y"].tolist() == [5, 0, 2, 1, 3, 4]
    assert federation.client(1)["y"].tolist() == [0, 2]
    assert federation.batch(2, np.array([2, 0]))["y"].tolist() == [4, 1]


def test_bytes_stay_bytes_and_a_client_is_a_view() -> None:
    federation = some()
    mine = federation.client(1)["x"]
    assert mine.dtype == torch.uint8
    assert mine.untyped_storage().data_ptr() == federation.fields["x"].untyped_storage().data_ptr()


@given(ids=st.lists(st.sampled_from(["ann", "bob", "cy"]), min_size=1))
def test_from_ids_keeps_every_example_once_and_in_order(ids: list[str]) -> None:
    federation = Federation.from_ids({"row": np.arange(len(ids))}, ids)
    names = sorted(set(ids))
    assert federation.clients == len(names)
    for index, name in enumerate(names):
        own = [row for row, owner in enumerate(ids) if owner == name]
        assert federation.client(index)["row"].tolist() == own


@pytest.mark.parametrize("by_size", [True, False])
def test_example_weights_sum_to_one(by_size: bool) -> None:
    weights = some().example_weights(by_size)
    assert weights.sum() == pytest.approx(1)
    assert weights[0] == pytest.approx(1 / 6 if by_size else 1 / 3)


def test_a_client_without_examples_is_refused() -> None:
    with pytest.raises(UsageError, match="client 1 has no examples"):
        Federation.from_parts({"x": np.arange(3)}, [np.array([0]), np.array([], int)])


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(UsageError, match="'x' holds values that are not finite"):
        Federation.from_ids({"x": [1.0, float("nan")]}, [0, 1])


def test_save_and_open_give_it_back(tmp_path: Path) -> None:
    some().save(tmp_path / "clients.npz")
    back = Federation.open(tmp_path / "clients.npz")
    assert same(back, some())
    assert [path.name for path in tmp_path.iterdir()] == ["clients.npz"]


def test_open_says_what_is_no_federation(tmp_path: Path) -> None:
    from fedexp.data.sources import cache

    cache.write(tmp_path / "a.npz", {"x": np.arange(3)})
    with pytest.raises(UsageError, match="is not a saved federation"):
        Federation.open(tmp_path / "a.npz")
    with pytest.raises(UsageError, match="nowhere"):
        Federation.open(tmp_path / "nowhere.npz")


def test_from_torch_dataset() -> None:
    parts = [np.array([2]), np.array([0, 3])]
    x, y = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
    made = Federation.from_torch_dataset(TensorDataset(x, y), parts)
    assert same(made, Federation.from_parts({"x": x, "y": y}, parts))


class Pictures(Dataset[Any]):
    """As a torchvision data set without transforms: a pillow image and a plain number."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.pixels[index]), index


def test_from_torch_dataset_of_pictures() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
    parts = [np.array([2, 1]), np.array([0])]
    made = Federation.from_torch_dataset(Pictures(pixels), parts, names=("image", "number"))
    assert made.fields["image"].dtype == torch.uint8
    np.testing.assert_array_equal(made.fields["image"], pixels[[2, 1, 0]].transpose(0, 3, 1, 2))
    assert made.fields["number"].tolist() == [2, 1, 0]
    assert made.fields["number"].dtype == torch.int64


def test_examples_of_different_shapes_are_refused() -> None:
    ragged: Any = [(np.zeros(3), 0), (np.zeros(4), 0)]
    with pytest.raises(UsageError, match="'x' of example 1 has shape"):
        Federation.from_torch_dataset(ragged, [np.array([0, 1])])


class Partitioner:
    """The part of a partitioner of Flower Datasets that is used."""

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
    made = Federation.from_flower(partitioner, {"x": "image", "y": "label"})
    assert made.sizes.tolist() == [1, 2]
    assert made.fields["x"].shape == (3, 1, 2, 2)
    assert made.client(1)["y"].tolist() == [1, 2]
    with pytest.raises(UsageError, match="no column 'img'; the data has image, label, who"):
        Federation.from_flower(partitioner)


def paint(path: Path, value: int, size: tuple[int, int] = (4, 3)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)


def test_from_image_folder_with_a_folder_a_client(tmp_path: Path) -> None:
    paint(tmp_path / "bob" / "dog" / "1.png", 10)
    paint(tmp_path / "ann" / "dog" / "7.bmp", 20)
    paint(tmp_path / "ann" / "cat" / "2.PNG", 30)
    (tmp_path / "ann" / "notes.txt").write_text("not an image")
    made = Federation.from_image_folder(tmp_path)
    assert made.sizes.tolist() == [2, 1]  # ann, bob
    assert made.fields["x"].shape == (3, 3, 4, 3)
    assert made.fields["x"][:, 0, 0, 0].tolist() == [30, 20, 10]
    assert made.fields["y"].tolist() == [0, 1, 1]  # cat, dog


def test_from_image_folder_with_a_function(tmp_path: Path) -> None:
    paint(tmp_path / "cat" / "bob-1.png", 1)
    paint(tmp_path / "dog" / "ann-1.png", 2, size=(8, 8))
    made = Federation.from_image_folder(
        tmp_path,
        client=lambda path: path.stem.split("-")[0],
        classes=("dog", "ape", "cat"),
        size=(5, 6),
        mode="L",
    )
    assert made.fields["x"].shape == (2, 1, 5, 6)
    assert made.fields["x"][:, 0, 0, 0].tolist() == [2, 1]
    assert made.fields["y"].tolist() == [0, 2]


def test_from_image_folder_says_what_is_wrong(tmp_path: Path) -> None:
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
