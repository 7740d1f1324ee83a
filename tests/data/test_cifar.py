"""CIFAR-10 and CIFAR-100 from files in the official layout, and pickles that mean harm."""

import io
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedexp.data.datasets import cifar10, cifar100
from fedexp.data.sources import cache
from fedexp.data.sources.cifar import read_batch
from fedexp.data.sources.download import cache_path
from fedexp.data.sources.safe_pickle import read_pickle
from fedexp.errors import UsageError


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_official_layout_is_read(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue(f"write_{name}")(tmp_path)
    for _ in range(2):  # from the files, and from the cache
        raw = {"cifar10": cifar10, "cifar100": cifar100}[name](tmp_path)
        for split, batch in (("train", raw.train), ("test", raw.test)):
            np.testing.assert_array_equal(batch["x"], expected[f"{split}_x"])
            np.testing.assert_array_equal(batch["y"], expected[f"{split}_y"])
        assert raw.train["x"].dtype == torch.uint8
        assert raw.train["y"].dtype == torch.int64


def test_the_cache_is_enough(tmp_path: Path, write_cifar100: Callable[[Path], Any]) -> None:
    write_cifar100(tmp_path)
    cifar100(tmp_path)
    (tmp_path / "cifar-100-python").rename(tmp_path / "elsewhere")
    assert len(cifar100(tmp_path).train["y"]) == 100


OTHER = {
    "other arrays": ({"x": np.arange(3)}, cache.FORMAT, "does not hold the train images"),
    "other types": ({"train_x": np.arange(3)}, cache.FORMAT, "does not hold the train images"),
    "an older format": ({}, cache.FORMAT - 1, "made by another version"),
}


@pytest.mark.parametrize("what", OTHER)
def test_another_cache_is_made_anew_or_refused_without_the_files(
    what: str, tmp_path: Path, write_cifar10: Callable[[Path], Any]
) -> None:
    arrays, version, said = OTHER[what]
    write_cifar10(tmp_path)
    expected = cifar10(tmp_path).train["y"]
    path = cache_path(tmp_path, "cifar10")
    good, note = cache.read(path)
    cache.write(path, arrays or good, note | {"format": version})
    assert torch.equal(cifar10(tmp_path).train["y"], expected)
    cache.write(path, arrays or good, note | {"format": version})
    (tmp_path / "cifar-10-batches-py").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError) as caught:
        cifar10(tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.count(str(path)) == 1
    assert said in line
    assert "delete it and run 'fedexp data fetch cifar10'" in line


def test_what_is_absent_is_described_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        cifar10(tmp_path)
    line = str(caught.value)
    assert "\n" not in line
    for part in (str(tmp_path), "170,498,071 bytes", "md5 c58f30108f718f92721af3b95e74349a"):
        assert part in line


def test_it_has_no_natural_clients(tmp_path: Path, write_cifar10: Callable[[Path], Any]) -> None:
    write_cifar10(tmp_path)
    raw = cifar10(tmp_path)
    with pytest.raises(UsageError, match="has no natural clients; give a partition"):
        raw.federation()
    assert raw.federation([np.arange(3), np.arange(3, 50)]).sizes.tolist() == [3, 47]


def python2(text: bytes) -> bytes:
    """A string as Python 2 pickled it."""
    return b"T" + struct.pack("<i", len(text)) + text


def official_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 and numpy 1 wrote the official files, protocol 2, op by op."""
    rows = struct.pack("<H", len(pixels))
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01M" + rows + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + python2(pixels.tobytes())
    ) + b"tb"
    listed = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    entries = python2(b"data") + array + python2(b"labels") + listed
    return b"\x80\x02}(" + entries + b"u."


def test_a_pickle_of_python_2_is_read(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    (tmp_path / "batch").write_bytes(official_pickle(pixels, [6, 9, 0]))
    images, labels = read_batch(tmp_path / "batch", "labels", 10)
    np.testing.assert_array_equal(images.reshape(3, 3072), pixels)
    assert labels.tolist() == [6, 9, 0]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_numbers_are_admitted(tmp_path: Path, protocol: int, order: Any) -> None:
    arrays = [np.array([[1, 2], [3, 4]], code, order=order) for code in (">i4", "<f8", "u1", "?")]
    (tmp_path / "p").write_bytes(pickle.dumps({"a": arrays, "b": (1, 2.5, "s", None)}, protocol))
    back = read_pickle(tmp_path / "p")
    for array, found in zip(arrays, back["a"], strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
    assert back["b"][:2] == (1, 2.5)


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


HARM = {
    "a command": (Calls(os.system, "echo harm > harm"), "system"),
    "code": (Calls(eval, "open('harm', 'w')"), "eval"),
    "a file": (Calls(open, "harm", "w"), "open"),
    "numpy": (Calls(np.save, "harm", 1), "numpy"),
    "a class": (Calls(io.BytesIO, b"1"), "BytesIO"),
    "objects": (np.array([{}], dtype=object), "array of type 'O8'"),
    "a record": (np.zeros(1, dtype="i4,f4"), "array of type 'V8'"),
}


@pytest.mark.parametrize("what", HARM)
def test_a_pickle_that_calls_a_function_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, said = HARM[what]
    monkeypatch.chdir(tmp_path)
    Path("batch").write_bytes(pickle.dumps({"data": content}, protocol=2))
    with pytest.raises(UsageError, match="batch: refused or damaged pickle") as caught:
        read_pickle(Path("batch"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize(
    "code",
    [
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR.",  # a type by itself
        b"cnumpy\nndarray\n(K\x05tR.",  # an array made by a call of its class
        b"cnumpy.core.multiarray\n_reconstruct\n)R.",  # an array that is never filled
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00bz2tR.",  # another encoding
        b"c_codecs\nencode\n}X\x01\x00\x00\x00aK\x01sb.",  # an attribute set on a function
        b"cnumpy\nndarray\n.",  # a class as the content
        b"](K\x01K\x02e.",  # a list
        b"",
    ],
)
def test_the_admitted_names_cannot_be_misused(code: bytes, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"\x80\x02" + code)
    with pytest.raises(UsageError, match="p: "):
        read_pickle(tmp_path / "p")


def unfolding(depth: int) -> list[Any]:
    """A list of few bytes which, gone through naively, has 2 ** depth entries."""
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def test_shared_lists_are_gone_through_once(tmp_path: Path) -> None:
    content = {"data": PIXELS, "labels": unfolding(60)}
    (tmp_path / "p").write_bytes(pickle.dumps(content, protocol=2))
    back = read_pickle(tmp_path / "p")["labels"]
    assert back[0] is back[1]
    with pytest.raises(UsageError, match="p: labels are not a list of whole numbers"):
        read_batch(tmp_path / "p", "labels", 10)


def test_a_list_within_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = []
    endless.append(endless)
    (tmp_path / "p").write_bytes(pickle.dumps({"data": endless}, protocol=2))
    with pytest.raises(UsageError, match="p: refused or damaged pickle"):
        read_pickle(tmp_path / "p")


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
    "floats": (changed(GOOD, data=PIXELS.astype(np.float32)), "not an array of bytes"),
    "wrong width": (changed(GOOD, data=PIXELS[:, :784]), "not an array of bytes"),
    "truncated": (pickle.dumps(GOOD, protocol=2)[:-50], "refused or damaged pickle"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_named_and_leaves_no_cache(
    what: str, tmp_path: Path, write_cifar10: Callable[[Path], Any]
) -> None:
    write_cifar10(tmp_path)
    content, said = BAD[what]
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(UsageError, match="data_batch_3: ") as caught:
        cifar10(tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_missing_file_is_named(tmp_path: Path, write_cifar10: Callable[[Path], Any]) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(UsageError, match="data_batch_4: missing"):
        cifar10(tmp_path)


# Facts of the real data sets: the first labels, equal classes, and the channels' means, which are
# those that everybody normalises with.
REAL = {
    "cifar10": (10, [6, 9, 9, 4], [3, 8, 8, 0], (0.4914, 0.4822, 0.4465)),
    "cifar100": (100, None, None, (0.5071, 0.4865, 0.4409)),
}


@pytest.mark.parametrize("name", REAL)
def test_the_real_data(name: str, real_folder: Callable[[str], Path]) -> None:
    classes, first_train, first_test, means = REAL[name]
    raw = {"cifar10": cifar10, "cifar100": cifar100}[name](real_folder(name))
    assert raw.train["x"].shape == (50_000, 3, 32, 32)
    assert raw.test["x"].shape == (10_000, 3, 32, 32)
    assert torch.bincount(raw.train["y"]).tolist() == [50_000 // classes] * classes
    assert torch.bincount(raw.test["y"]).tolist() == [10_000 // classes] * classes
    if first_train:
        assert raw.train["y"][:4].tolist() == first_train
        assert raw.test["y"][:4].tolist() == first_test
    channels = raw.train["x"].numpy().mean(axis=(0, 2, 3)) / 255
    np.testing.assert_allclose(channels, means, atol=1e-4)
