"""CIFAR-10 and CIFAR-100 from files in the official layout."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedexp.data.datasets import load
from fedexp.data.sources import cache
from fedexp.data.sources.download import cache_path
from fedexp.errors import UsageError


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_official_layout_is_read(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue(f"write_{name}")(tmp_path)
    for _ in range(2):  # from the files, and from the cache
        raw = load(name, tmp_path)
        for split, batch in (("train", raw.train), ("test", raw.test)):
            np.testing.assert_array_equal(batch["x"], expected[f"{split}_x"])
            np.testing.assert_array_equal(batch["y"], expected[f"{split}_y"])
        assert raw.train["x"].dtype == torch.uint8
        assert raw.train["y"].dtype == torch.int64


def test_the_cache_alone_is_enough(tmp_path: Path, write_cifar100: Callable[[Path], Any]) -> None:
    write_cifar100(tmp_path)
    load("cifar100", tmp_path)
    (tmp_path / "cifar-100-python").rename(tmp_path / "elsewhere")
    assert len(load("cifar100", tmp_path).train["y"]) == 100


OTHER = {
    "other arrays": ({"x": np.arange(3)}, cache.FORMAT, "does not hold the train images"),
    "other types": ({"train_x": np.arange(3)}, cache.FORMAT, "does not hold the train images"),
    "an older format": ({}, cache.FORMAT - 1, "written by another version"),
}


@pytest.mark.parametrize("what", OTHER)
def test_an_unusable_cache_is_rebuilt_or_refused_without_the_files(
    what: str, tmp_path: Path, write_cifar10: Callable[[Path], Any]
) -> None:
    arrays, version, message = OTHER[what]
    write_cifar10(tmp_path)
    expected = load("cifar10", tmp_path).train["y"]
    path = cache_path(tmp_path, "cifar10")
    good, note = cache.read(path)
    cache.write(path, arrays or good, note | {"format": version})
    assert torch.equal(load("cifar10", tmp_path).train["y"], expected)
    cache.write(path, arrays or good, note | {"format": version})
    (tmp_path / "cifar-10-batches-py").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError) as caught:
        load("cifar10", tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.count(str(path)) == 1
    assert message in line
    assert "delete it and run 'fedexp data fetch cifar10'" in line


def test_a_missing_data_set_is_described_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load("cifar10", tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    for part in (str(tmp_path), "170,498,071 bytes", "md5 c58f30108f718f92721af3b95e74349a"):
        assert part in line


def test_it_has_no_natural_clients(tmp_path: Path, write_cifar10: Callable[[Path], Any]) -> None:
    write_cifar10(tmp_path)
    raw = load("cifar10", tmp_path)
    with pytest.raises(UsageError, match="has no natural clients; give a partition"):
        raw.federation()
    assert raw.federation([np.arange(3), np.arange(3, 50)]).sizes.tolist() == [3, 47]


def changed(content: dict[bytes, Any], **change: Any) -> bytes:
    return pickle.dumps(content | {k.encode(): v for k, v in change.items()}, protocol=2)


PIXELS = np.zeros((2, 3072), np.uint8)
GOOD = {b"data": PIXELS, b"labels": [0, 9]}
BAD = {
    "label out of range": (changed(GOOD, labels=[0, 10]), "label 10 of example 1 is out of range"),
    "negative label": (changed(GOOD, labels=[-1, 0]), "label -1 of example 0 is out of range"),
    "labels of text": (changed(GOOD, labels=["a", "b"]), "not a list of whole numbers"),
    "labels are a number": (changed(GOOD, labels=3), "not a list of whole numbers"),
    "too few labels": (changed(GOOD, labels=[1]), "has 2 images and 1 labels"),
    "no labels": (pickle.dumps({b"data": PIXELS}), "has no 'labels'"),
    "floats": (changed(GOOD, data=PIXELS.astype(np.float32)), "not a uint8 array"),
    "wrong width": (changed(GOOD, data=PIXELS[:, :784]), "not a uint8 array"),
    "truncated": (pickle.dumps(GOOD, protocol=2)[:-50], "refused or damaged pickle"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_named_and_leaves_no_cache(
    what: str, tmp_path: Path, write_cifar10: Callable[[Path], Any]
) -> None:
    write_cifar10(tmp_path)
    content, message = BAD[what]
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(UsageError, match="data_batch_3: ") as caught:
        load("cifar10", tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_is_named(tmp_path: Path, write_cifar10: Callable[[Path], Any]) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(UsageError, match="data_batch_4: missing"):
        load("cifar10", tmp_path)


# Facts of the real data sets: the first labels, balanced classes, and the channel means commonly
# used for normalisation.
REAL = {
    "cifar10": (10, [6, 9, 9, 4], [3, 8, 8, 0], (0.4914, 0.4822, 0.4465)),
    "cifar100": (100, None, None, (0.5071, 0.4865, 0.4409)),
}


@pytest.mark.parametrize("name", REAL)
def test_the_real_data(name: str, real_folder: Callable[[str], Path]) -> None:
    classes, first_train, first_test, means = REAL[name]
    raw = load(name, real_folder(name))
    assert raw.train["x"].shape == (50_000, 3, 32, 32)
    assert raw.test["x"].shape == (10_000, 3, 32, 32)
    assert torch.bincount(raw.train["y"]).tolist() == [50_000 // classes] * classes
    assert torch.bincount(raw.test["y"]).tolist() == [10_000 // classes] * classes
    if first_train:
        assert raw.train["y"][:4].tolist() == first_train
        assert raw.test["y"][:4].tolist() == first_test
    channels = raw.train["x"].numpy().mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(channels, means, atol=1e-4)
