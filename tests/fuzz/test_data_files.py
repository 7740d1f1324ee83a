"""Damaged and malicious data files: pickles, HDF5, JSON, images, caches and archives."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedexp.data import Federation
from fedexp.data.datasets import RawSplits
from fedexp.data.sources import cache, cifar, emnist, image_file, mnist
from fedexp.data.sources.download import unpack
from fedexp.data.sources.emnist import EMNIST
from fedexp.data.sources.image_folder import decode
from fedexp.data.sources.safe_pickle import read_pickle
from fedexp.errors import UsageError
from tests.fuzz.hostile import Files, contents, forged, fuzz, harmless, mutated
from tests.helpers.generated_data import as_published

Seeds = Files
IMAGE = 6 * image_file.MAX_PIXELS  # bytes: decoded, and as an array
PIXELS = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)


@pytest.fixture(scope="module")
def pickles() -> Seeds:
    """CIFAR's layout in every pickle protocol, with labels as a list and as an array."""
    listed = {b"data": PIXELS[:, :3072], b"labels": [3, 4], b"filenames": [b"a", b"b"]}
    arrays = {"data": PIXELS[:1], "labels": np.array([1]), "x": {"y": (1, 2.5, None, True)}}
    protocols = range(pickle.HIGHEST_PROTOCOL + 1)
    made = [pickle.dumps(each, protocol=p) for p in protocols for each in (listed, arrays)]
    return Files({str(k): data for k, data in enumerate(made)})


@fuzz(300)
def test_pickles(pickles: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    path = tmp_path_factory.getbasetemp() / "batch"
    path.write_bytes(mutated(draw, *pickles.values()))
    harmless(lambda: cifar.read_batch(path, "labels", 10))


@fuzz(200)
def test_pickles_of_random_opcodes(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    """Opcodes in random order, with valid arguments and admitted names."""
    path = tmp_path_factory.getbasetemp() / "program"
    path.write_bytes(_program(draw))
    harmless(lambda: cifar.read_batch(path, "labels", 10))


PIECES = [
    *(b"(", b"0", b"1", b"2", b"N", b"]", b")", b"}", b"\x8f", b"\x85", b"\x86", b"\x87", b"t"),
    *(b"a", b"e", b"s", b"u", b"R", b"b", b"\x81", b"\x92", b"o", b"d", b"l", b"\x91", b"\x90"),
    *(b"K\x05", b"K\x00", b"M\xff\xff", b"J\xff\xff\xff\xff", b"\x8a\x01\x05", b"I01\n", b"F1e9\n"),
    *(b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"\x94", b"\x93", b"r\x00\x00\x10\x00", b"p7\n"),
    *(b"U\x01b", b"U\x02u1", b"C\x03abc", b"X\x04\x00\x00\x00data", b"X\x06\x00\x00\x00labels"),
    *(b"X\x06\x00\x00\x00latin1", b"X\x01\x00\x00\x00<", b"\x8c\x01|", b"G?\xf0\0\0\0\0\0\0"),
    *(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n"),
    *(b"c_codecs\nencode\n", b"cos\nsystem\n", b"inumpy\ndtype\n", b"Pid\n", b"Q", b"\x82\x01"),
    *(
        b"\x96\x03\0\0\0\0\0\0\0abc",
        b"\x97",
        b"\x98",
        b"cbuiltins\neval\n",
        b"\x95\x02\0\0\0\0\0\0\0",
    ),
]


def _program(draw: Random) -> bytes:
    return b"\x80\x05" + b"".join(draw.choices(PIECES, k=draw.randint(1, 40))) + b"."


@pytest.fixture(scope="module")
def idx_files() -> Seeds:
    """Images in the IDX format, as they are and compressed."""
    plain = bytes((0, 0, 8, 3)) + struct.pack(">3I", 2, 28, 28) + bytes(2 * 784)
    return Files({"plain": plain, "gz": gzip.compress(plain, mtime=0)})


@fuzz(200)
def test_idx_files(
    idx_files: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    path = tmp_path_factory.getbasetemp() / draw.choice(["images", "images.gz"])
    path.write_bytes(mutated(draw, *idx_files.values()))
    harmless(lambda: mnist.read_idx(path, dimensions=3))


@pytest.fixture(scope="module")
def hdf5(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    import h5py

    folder, made = tmp_path_factory.mktemp("hdf5"), Files()
    for name, options in {"plain": {}, "chunked": {"chunks": True, "compression": "gzip"}}.items():
        with h5py.File(folder / name, "w", track_order=False) as file:
            for k in range(2):
                group = file.create_group(f"examples/f{k}")
                pixels = np.full((2, 28, 28), 0.5, np.float32)
                group.create_dataset("pixels", data=pixels, track_times=False, **options)
                group.create_dataset("label", data=np.array([1, 2]), track_times=False, **options)
        made[name] = (folder / name).read_bytes()
    return made


@fuzz(250)
def test_hdf5(hdf5: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    path = tmp_path_factory.getbasetemp() / "fed_emnist_train.h5"
    path.write_bytes(mutated(draw, *hdf5.values()))

    def read() -> None:
        split = emnist.hdf5_split(path)
        for _ in split.pixels:
            pass

    harmless(read)


def leaf() -> dict[str, Any]:
    example = [0.5] * 784
    users = {"f0": {"x": [example], "y": [3]}, "f1": {"x": [], "y": []}}
    return {"users": ["f0", "f1"], "num_samples": [1, 0], "user_data": users}


@fuzz(150)
def test_leaf_json(tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    path = tmp_path_factory.getbasetemp() / "all_data_0.json"
    if draw.random() < 0.5:
        path.write_bytes(mutated(draw, json.dumps(leaf()).encode()))
    else:
        path.write_text(json.dumps(forged(draw, leaf())))
    harmless(lambda: list(emnist.leaf_split([path]).pixels))


@pytest.fixture(scope="module")
def images() -> Seeds:
    """Small images in every supported format."""
    made = Files()
    picture = Image.fromarray(np.arange(32 * 32 * 3, dtype=np.uint8).reshape(32, 32, 3))
    for kind in ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP"):
        for mode in ("RGB", "L", "P") if kind == "PNG" else ("RGB",):
            buffer = io.BytesIO()
            picture.convert(mode).save(buffer, kind)
            made[f"{kind} {mode}"] = buffer.getvalue()
    return made


@fuzz(300)
def test_images(images: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    path = tmp_path_factory.getbasetemp() / "image.png"
    path.write_bytes(mutated(draw, *images.values()))
    size = draw.choice([None, (32, 32)])
    resize = size is not None and draw.random() < 0.5
    harmless(lambda: decode(path, draw.choice(["RGB", "L"]), size, resize), memory=IMAGE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    """A federation as `Federation.save` writes it; the date in the file is always the same."""
    path = tmp_path_factory.mktemp("saved") / "saved.npz"
    x, y = np.zeros((4, 1, 2, 2), np.uint8), np.arange(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.time", lambda: 1.7e9)
        Federation.from_ids({"x": x, "y": y}, [0, 0, 1, 1]).save(path)
    return Files({"whole": path.read_bytes()})


@fuzz(300)
def test_saved_federations(
    saved: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random
) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.npz"
    path.write_bytes(mutated(draw, saved["whole"]))

    def read() -> None:
        found = Federation.open(path)
        for client in range(min(found.clients, 5)):
            assert {name: value.sum() for name, value in found.client(client).items()}

    harmless(read)


@pytest.fixture(scope="module")
def archives() -> Seeds:
    """The archive of EMNIST, in every compression that tarfile supports."""
    made = Files()
    for kind in ("", "gz", "bz2", "xz"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
            for name in EMNIST.entries:
                member = tarfile.TarInfo(name)
                member.size = 5
                archive.addfile(member, io.BytesIO(b"bytes"))
        made[kind] = buffer.getvalue()
    return made


@fuzz(100)
def test_archives(archives: Seeds, tmp_path_factory: pytest.TempPathFactory, draw: Random) -> None:
    """All files are unpacked or none, and nothing is written outside the data folder."""
    parent = tmp_path_factory.mktemp("unpacked")
    folder = parent / "data"
    folder.mkdir()
    archive = folder / EMNIST.archive
    archive.write_bytes(mutated(draw, *archives.values()))
    source = as_published(EMNIST, archive)
    refused = harmless(lambda: unpack(source, folder), writes=True)
    found = set(contents(parent)) - {f"data/{EMNIST.archive}"}
    assert found == (set() if refused else {f"data/{name}" for name in EMNIST.entries})


# Files of a few bytes that caused gigabytes of memory, a crash or a process.
def huge_memo(path: Path) -> None:
    path.write_bytes(b"\x80\x02]r" + struct.pack("<I", 2**26) + b".")


def nested_tuples(path: Path) -> None:
    """Hashing such a key overflows the stack and crashes the process."""
    path.write_bytes(b"\x80\x02})" + 200_000 * b"\x85" + b"K\x01s.")


def repeated_encoding(path: Path) -> None:
    text = b"a" * 2**20
    head = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", len(text)) + text + b"q\x01("
    path.write_bytes(head + 200 * b"h\x00h\x01\x85R" + b"l.")


def huge_hdf5(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        group = file.create_group("examples/a\nb")
        group.create_dataset("label", shape=(10**8,), dtype="i4", chunks=(1000,))
        group.create_dataset("pixels", shape=(10**8, 28, 28), dtype="f4", chunks=(1, 28, 28))


def object_array(path: Path) -> None:
    """An array of objects, whose bytes would be interpreted as pointers."""
    header = io.BytesIO()
    described = {"descr": "|O", "fortran_order": False, "shape": (2,)}
    np.lib.format.write_array_header_1_0(header, described)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"\1" * 16)
        archive.writestr("offsets.npy", _array(np.array([0, 2])))
        archive.writestr(cache.NOTE, "{}")


def huge_note(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(cache.NOTE, b"[" + 2**27 * b" " + b"]")


def postscript(path: Path) -> None:
    """PostScript with another suffix, for which PIL starts Ghostscript."""
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"
    )


def large_image(path: Path) -> None:
    rows = columns = 9000

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0)
    pixels = zlib.compress(bytes((columns + 1) * rows), 1)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + parts)


def _array(value: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value)
    return buffer.getvalue()


BOMBS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Any], str]] = {
    "memo": (huge_memo, read_pickle, "its memo index is too large"),
    "nesting": (nested_tuples, read_pickle, "more than 10000 tuples"),
    "encoding": (repeated_encoding, read_pickle, "encodes more text than it has"),
    "hdf5": (huge_hdf5, emnist.hdf5_split, "a?b has pixels of shape (100000000, 28, 28)"),
    "pointers": (object_array, Federation.open, "x.npy does not hold plain numbers"),
    "note": (huge_note, Federation.open, "note.json is not stored as is"),
    "program": (postscript, decode, "not an image that can be read"),
    "large image": (large_image, decode, "9000x9000 pixels, which is too large"),
    "image": (large_image, lambda path: decode(path, "RGB", (32, 32)), "not 32x32"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_small_files_use_little_memory(what: str, tmp_path: Path) -> None:
    write, read, message = BOMBS[what]
    path = tmp_path / "file.png"
    write(path)
    assert message in harmless(lambda: read(path))


def test_labels_out_of_range_are_refused() -> None:
    images = {f"{split}_x": np.zeros((2, 1, 2, 2), np.uint8) for split in ("train", "test")}
    labels = {f"{split}_y": np.array([0, 10]) for split in ("train", "test")}
    with pytest.raises(UsageError, match="label 10 of example 1 is out of range"):
        RawSplits.of("mine", 10, {**images, **labels})


def test_a_named_pipe_is_not_opened(tmp_path: Path) -> None:
    """Opening it would block forever."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    os.mkfifo(tmp_path / "a" / "b" / "x.png")
    with pytest.raises(UsageError, match="holds no images"):
        Federation.from_image_folder(tmp_path)
