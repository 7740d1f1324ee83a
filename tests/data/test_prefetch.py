"""Reading ahead: the right pages are fetched, and rows that travel are the clients' own."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedexp.data import Federation, federation, streaming
from fedexp.data.sources import cache
from fedexp.data.streaming import Streamed, ask_for, on_device

ROWS = 2**15  # a client, of 64 bytes: two megabytes, which is far from the neighbours' pages
FAR = [3, 40, 41, 77]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A hundred clients in a file that is on the disk, and in memory no more."""
    path = tmp_path / "federation.npz"
    x = torch.zeros(100 * ROWS, 64, dtype=torch.uint8)
    Federation({"x": x}, np.arange(101) * ROWS).save(path)
    _forget(path)
    return path


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(federation: Federation) -> list[int]:
    """The clients the middle of whose rows is in memory, as the system says without reading it."""
    begin, found = federation.fields["x"].data_ptr(), ctypes.c_ubyte()
    ask, clients = ctypes.CDLL(None).mincore, []
    for client in range(federation.clients):
        at = (begin + client * ROWS * 64 + ROWS * 32) // mmap.PAGESIZE * mmap.PAGESIZE
        assert ask(ctypes.c_void_p(at), ctypes.c_size_t(1), ctypes.byref(found)) == 0
        clients += [client] if found.value & 1 else []
    return clients


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_the_clients_pages_are_read_and_no_others(saved: Path) -> None:
    federation = Federation.open(saved)
    if in_memory(federation):
        pytest.skip("this file system keeps its files in memory")
    assert ask_for(federation, np.array(FAR)) >= len(FAR) * ROWS * 64
    tries = 0
    while in_memory(federation) != FAR and tries < 500:  # the system reads on its own
        tries += 1
        time.sleep(0.01)
    assert in_memory(federation) == FAR


def test_neighbouring_pages_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small clients share pages, and clients in a row need one call."""
    calls: list[tuple[int, int]] = []
    advise = lambda at, size, how: calls.append((at, size))  # noqa: E731
    monkeypatch.setattr(streaming, "_advise", lambda: advise)
    page = mmap.PAGESIZE
    x = torch.zeros(100 * page, dtype=torch.uint8)
    federation = Federation({"x": x}, np.arange(401) * (page // 4))
    begin = x.data_ptr()
    ask_for(federation, np.array([0, 1, 2, 3, 4, 200, 203, 399]))
    for client in (0, 4, 200, 203, 399):
        first, last = begin + client * (page // 4), begin + (client + 1) * (page // 4)
        assert any(at <= first and last <= at + size for at, size in calls)
    assert len(calls) == 3
    assert all(at % page == 0 and size <= 3 * page for at, size in calls)


def test_no_more_is_asked_for_than_memory_should_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MOST_BYTES", 3 * mmap.PAGESIZE)
    x = torch.zeros(10 * mmap.PAGESIZE, dtype=torch.uint8)
    federation = Federation({"x": x}, np.arange(11) * mmap.PAGESIZE)
    assert ask_for(federation, np.arange(10)) == 3 * mmap.PAGESIZE


def unequal(target: str = "cpu") -> tuple[Federation, Streamed]:
    x = torch.arange(30.0).reshape(15, 2)
    plain = Federation({"x": x, "y": torch.arange(15)}, np.array([0, 4, 5, 9, 15]))
    return plain, Streamed(plain.fields, plain.offsets, torch.device(target), finite=True)


@pytest.mark.parametrize("prepared", [False, True])
def test_rows_travel_client_after_client(prepared: bool) -> None:
    plain, streamed = unequal()
    chosen = [1, 3]
    if prepared:
        streamed.prepare(chosen)
    rows = streamed.travelling(chosen)
    for client, at in zip(chosen, streamed.places(np.array(chosen)), strict=True):
        for name, value in plain.client(client).items():
            assert torch.equal(rows[name][at : at + len(value)], value)


def test_every_cohort_of_a_size_travels_in_as_much_room() -> None:
    _, streamed = unequal()
    sizes = {len(streamed.travelling(chosen)["x"]) for chosen in ([0, 1], [1, 2], [2, 3])}
    assert sizes == {4 + 6}


def test_what_was_prepared_for_others_is_not_taken() -> None:
    plain, streamed = unequal()
    streamed.prepare([0, 1])
    assert torch.equal(streamed.travelling([2])["y"][:4], plain.client(2)["y"])


def test_examples_are_handed_out_on_the_device() -> None:
    _, streamed = unequal("meta")
    assert streamed.device.type == "meta"
    for batch in (
        streamed.client(1),
        streamed.batch(2, np.array([0, 3])),
        streamed.travelling([1]),
    ):
        assert {value.device.type for value in batch.values()} == {"meta"}


def test_data_stay_whole_where_they_fit() -> None:
    plain, _ = unequal()
    assert type(on_device(plain, torch.device("cpu"))) is Federation


def test_data_that_were_checked_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a federation larger than memory, that would be the longest part of a short run."""
    plain, _ = unequal()
    plain.save(tmp_path / "saved.npz")
    arrays = {name: value.numpy() for name, value in plain.fields.items()}
    cache.write(tmp_path / "strange.npz", {**arrays, "offsets": plain.offsets})
    read: list[str] = []
    monkeypatch.setattr(federation, "check_finite", lambda fields: read.append("all"))
    on_device(Federation.open(tmp_path / "saved.npz"), torch.device("cpu"))
    assert not read
    Federation.open(tmp_path / "strange.npz")
    assert read == ["all"]
