"""Pickles of plain data are read; those that call functions or exhaust memory are refused."""

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.data.sources.cifar import read_batch
from fedexp.data.sources.safe_pickle import read_pickle
from fedexp.errors import UsageError


def python2(text: bytes) -> bytes:
    """Return a string as Python 2 pickled it."""
    return b"T" + struct.pack("<i", len(text)) + text


def official_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """Return a batch as Python 2 and numpy 1 wrote the official files, in protocol 2."""
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
def test_arrays_of_numbers_are_read(tmp_path: Path, protocol: int, order: Any) -> None:
    codes = (">i4", "<f8", "u1", "?")
    arrays = {code: np.array([[1, 2], [3, 4]], code, order=order) for code in codes}
    (tmp_path / "p").write_bytes(pickle.dumps({**arrays, "b": (1, 2.5, "s", None)}, protocol))
    back = read_pickle(tmp_path / "p")
    for code, array in arrays.items():
        np.testing.assert_array_equal(back[code], array)
        assert back[code].dtype == array.dtype
    assert back["b"][:2] == (1, 2.5)


class Calls:
    """Pickles to a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


MALICIOUS = {
    "a command": (Calls(os.system, "echo written > written"), "system"),
    "code": (Calls(eval, "open('written', 'w')"), "eval"),
    "a file": (Calls(open, "written", "w"), "open"),
    "numpy": (Calls(np.save, "written", 1), "numpy"),
    "a class": (Calls(io.BytesIO, b"1"), "BytesIO"),
    "objects": (np.array([{}], dtype=object), "array of type 'O8'"),
    "a record": (np.zeros(1, dtype="i4,f4"), "array of type 'V8'"),
}


@pytest.mark.parametrize("what", MALICIOUS)
def test_a_pickle_that_calls_a_function_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, message = MALICIOUS[what]
    monkeypatch.chdir(tmp_path)
    Path("batch").write_bytes(pickle.dumps({"data": content}, protocol=2))
    with pytest.raises(UsageError, match="batch: refused or damaged pickle") as caught:
        read_pickle(Path("batch"))
    assert message in str(caught.value)
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


def expanding(depth: int) -> list[Any]:
    """Return a list of few bytes that expands to 2 ** depth entries."""
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value, value]
    return value


def recursive() -> list[Any]:
    """Return a list that holds itself."""
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.parametrize(
    "labels", [expanding(60), recursive(), [np.arange(2)]], ids=["expanding", "recursive", "array"]
)
def test_nested_labels_are_refused(labels: list[Any], tmp_path: Path) -> None:
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": labels}
    (tmp_path / "p").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UsageError, match="p: labels are not a list of whole numbers"):
        read_batch(tmp_path / "p", "labels", 10)
