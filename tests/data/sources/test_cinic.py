"""CINIC-10 from a folder of PNG files in the official layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedexp.data.datasets import load
from fedexp.data.sources import image_file, image_folder
from fedexp.data.sources.cinic import CLASSES
from fedexp.errors import UsageError

Write = Callable[[Path], dict[str, Any]]


def check_same(folder: Path, expected: dict[str, Any]) -> None:
    raw = load("cinic10", folder)
    for split, batch in (("train", raw.train), ("test", raw.test)):
        np.testing.assert_array_equal(batch["x"], expected[f"{split}_x"])
        np.testing.assert_array_equal(batch["y"], expected[f"{split}_y"])
        assert batch["x"].dtype == torch.uint8


def test_the_official_layout_is_read(tmp_path: Path, write_cinic10: Write) -> None:
    expected = write_cinic10(tmp_path)
    check_same(tmp_path, expected)
    check_same(tmp_path, expected)  # from the cache


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode in three processes at a time, seven files in each, however few files there are."""
    monkeypatch.setattr(image_folder, "BLOCK", 7 * 3072)
    monkeypatch.setattr(image_folder, "available_cores", lambda: 3)


@pytest.mark.usefixtures("workers")
def test_worker_processes_decode_the_same_images(tmp_path: Path, write_cinic10: Write) -> None:
    check_same(tmp_path, write_cinic10(tmp_path))


@pytest.mark.usefixtures("workers")
def test_a_worker_that_fails_is_replaced_by_this_process(
    tmp_path: Path, write_cinic10: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_file, "__file__", str(tmp_path / "no program"))
    check_same(tmp_path, write_cinic10(tmp_path))


@pytest.mark.usefixtures("workers")
def test_workers_name_a_bad_image_too(tmp_path: Path, write_cinic10: Write) -> None:
    write_cinic10(tmp_path)
    not_an_image(tmp_path / "CINIC-10" / "test" / "bird" / "cifar10-05.png")
    with pytest.raises(UsageError, match=r"bird.cifar10-05\.png: not an image"):
        load("cinic10", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_added_image_is_noticed(tmp_path: Path, write_cinic10: Write) -> None:
    write_cinic10(tmp_path)
    assert len(load("cinic10", tmp_path).train["y"]) == 20
    first = tmp_path / "CINIC-10" / "train" / "airplane"
    Image.new("RGB", (32, 32)).save(first / "imagenet-1.png")
    assert len(load("cinic10", tmp_path).train["y"]) == 21


def test_greyscale_images_are_converted_to_rgb(tmp_path: Path, write_cinic10: Write) -> None:
    write_cinic10(tmp_path)
    path = tmp_path / "CINIC-10" / "test" / "truck" / "zzz.png"
    Image.new("L", (32, 32), color=77).save(path)
    assert (load("cinic10", tmp_path).test["x"][-1] == 77).all()


def not_an_image(path: Path) -> None:
    path.write_text("this is not an image")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


def broken_inside(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)


def too_large(path: Path) -> None:
    Image.new("RGB", (40, 32)).save(path)


BAD: dict[Callable[[Path], None], str] = {
    not_an_image: "not an image",
    truncated: "not an image",
    broken_inside: "not an image",
    too_large: "is 32x40 pixels, not 32x32",
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("spoil", BAD, ids=lambda f: f.__name__)
def test_a_bad_image_is_named_and_leaves_no_cache(
    spoil: Callable[[Path], None], split: str, tmp_path: Path, write_cinic10: Write
) -> None:
    write_cinic10(tmp_path)
    spoil(tmp_path / "CINIC-10" / split / "bird" / "cifar10-05.png")
    with pytest.raises(UsageError, match=r"bird.cifar10-05\.png: ") as caught:
        load("cinic10", tmp_path)
    assert BAD[spoil] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_missing_classes_and_splits_are_named(tmp_path: Path, write_cinic10: Write) -> None:
    write_cinic10(tmp_path)
    ship = tmp_path / "CINIC-10" / "test" / "ship"
    ship.rename(tmp_path / "aside")
    with pytest.raises(UsageError, match=r"test.ship: "):
        load("cinic10", tmp_path)
    ship.mkdir()
    with pytest.raises(UsageError, match=r"test.ship: holds no \.png files"):
        load("cinic10", tmp_path)
    (tmp_path / "CINIC-10" / "train").rename(tmp_path / "train")
    with pytest.raises(UsageError, match="cinic10 is not in"):
        load("cinic10", tmp_path)


def test_classes_are_those_of_cifar10_in_its_order() -> None:
    assert list(CLASSES) == sorted(CLASSES)
    assert len(CLASSES) == 10


def test_the_real_data(real_folder: Callable[[str], Path]) -> None:
    raw = load("cinic10", real_folder("cinic10"))
    assert torch.bincount(raw.train["y"]).tolist() == [9000] * 10
    assert torch.bincount(raw.test["y"]).tolist() == [9000] * 10
    channels = raw.train["x"].numpy().mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(channels, (0.4789, 0.4723, 0.4305), atol=1e-3)
