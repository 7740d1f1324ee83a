"""Cache files: round trips, memory mapping, and no partial file after a failure."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedexp.data.sources import cache
from fedexp.data.sources.cache import Stream, cached, read, write
from fedexp.errors import UsageError, require

DTYPES = st.sampled_from([np.uint8, np.int32, np.int64, np.float32, np.float64, np.bool_])


@given(
    arrays=st.dictionaries(st.text("abcxyz_", min_size=1), hnp.arrays(DTYPES, (3, 2)), max_size=5)
)
def test_write_and_read_round_trip(
    arrays: dict[str, NDArray[Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cache") / "a.npz"
    write(path, arrays, {"made": "here"})
    back, note = read(path)
    assert note == {"made": "here"}
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == array.dtype


def test_numpy_reads_the_file_too(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", {"x": np.arange(6).reshape(2, 3)})
    with np.load(tmp_path / "a.npz") as loaded:
        np.testing.assert_array_equal(loaded["x"], [[0, 1, 2], [3, 4, 5]])


def test_arrays_are_mapped_aligned_and_never_written_back(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write(path, {"odd": np.arange(3, dtype=np.uint8), "y": np.arange(5)})
    arrays, _ = read(path)
    for array in arrays.values():
        assert isinstance(array, np.memmap)
        assert array.ctypes.data % 64 == 0
    before = path.read_bytes()
    torch.from_numpy(arrays["y"])[0] = 7
    assert arrays["y"][0] == 7
    assert path.read_bytes() == before


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's /proc")
def test_two_processes_share_the_pages(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write(path, {"x": np.ones(1 << 22, dtype=np.uint8)})
    arrays, _ = read(path)
    assert arrays["x"].sum() == 1 << 22  # touch every page here, and in the other process
    other = f"""
from fedexp.data.sources.cache import read; from pathlib import Path
arrays, _ = read(Path({str(path)!r})); assert arrays["x"].sum() == {1 << 22}
lines = open("/proc/self/smaps").read().split({str(path)!r})[1].splitlines()
print(sum([int(line.split()[1]) for line in lines if line.startswith("Shared_")][:2]))
"""
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 4000  # kB of 4096, clean and dirty


def test_empty_arrays(tmp_path: Path) -> None:
    write(tmp_path / "a.npz", {"x": np.zeros((0, 3), np.float32), "y": np.arange(2)})
    arrays, _ = read(tmp_path / "a.npz")
    assert arrays["x"].shape == (0, 3)
    assert arrays["y"].tolist() == [0, 1]


def test_a_stream_is_written_block_by_block(tmp_path: Path) -> None:
    blocks = (np.full((2, 3), i, np.uint8) for i in range(4))
    write(tmp_path / "a.npz", {"x": Stream((8, 3), np.uint8, blocks)})
    assert read(tmp_path / "a.npz")[0]["x"][:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def failing(error: BaseException) -> Iterator[NDArray[Any]]:
    yield np.zeros((1, 2), np.uint8)
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("bad"), RuntimeError("worse")])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write(tmp_path / "a.npz", {"x": Stream((2, 2), np.uint8, failing(error))})
    assert list(tmp_path.iterdir()) == []


def test_a_stream_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs 3 rows, but its blocks have 1"):
        write(tmp_path / "a.npz", {"x": Stream((3,), np.uint8, [np.zeros(1)])})
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_file_survives_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write(path, {"x": np.arange(3)})
    with pytest.raises(UsageError):
        write(path, {"x": Stream((2, 2), np.uint8, failing(UsageError("bad")))})
    assert read(path)[0]["x"].tolist() == [0, 1, 2]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_text("one")
    return path


@pytest.fixture
def load(tmp_path: Path, source: Path) -> Callable[[], tuple[int, int]]:
    """Return a function that loads a value through the cache, and counts the builds."""
    built = [0]

    def build() -> cache.Arrays:
        built[0] += 1
        return {"x": np.array([len(source.read_text())])}

    def convert(arrays: cache.Mapped) -> int:
        require("x" in arrays, "it has no x")
        return int(arrays["x"][0])

    def loaded() -> tuple[int, int]:
        return cached(tmp_path / "cache" / "a.npz", [source], build, convert), built[0]

    return loaded


def test_it_is_built_once(load: Callable[[], tuple[int, int]]) -> None:
    assert [load(), load()] == [(3, 1), (3, 1)]


def test_a_changed_source_is_noticed(load: Callable[[], tuple[int, int]], source: Path) -> None:
    load()
    source.write_text("three")
    assert load() == (5, 2)
    os.utime(source, ns=(0, 0))  # same size, other time
    assert load() == (5, 3)


def test_a_damaged_cache_is_rebuilt(load: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    load()
    path = tmp_path / "cache" / "a.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert load() == (3, 2)


def test_a_cache_of_other_arrays_is_rebuilt(
    load: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    load()
    path = tmp_path / "cache" / "a.npz"
    write(path, {"other": np.arange(3)}, read(path)[1])
    assert load() == (3, 2)


def test_a_missing_source_is_named(load: Callable[[], tuple[int, int]], source: Path) -> None:
    source.unlink()
    with pytest.raises(UsageError, match="source: missing"):
        load()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match=r"cannot write to .*a\.npz: "):
        write(tmp_path / "file" / "a.npz", {"x": np.arange(3)})


def test_check_finds_a_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    write(path, {"x": np.zeros(1000, np.uint8)})
    cache.check(path)
    content = bytearray(path.read_bytes())
    content[700] = 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"a\.npz: damaged"):
        cache.check(path)


@pytest.mark.parametrize("note", ["3", "null", '"text"', "{"])
def test_an_invalid_note_is_refused(tmp_path: Path, note: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr(cache.NOTE, note)
    with pytest.raises(UsageError, match=r"a\.npz: not a data file"):
        read(tmp_path / "a.npz")


def test_another_zip_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.npz"
    np.savez_compressed(path, x=np.arange(3))
    with pytest.raises(UsageError, match=r"other\.npz: not a data file"):
        read(path)
