"""Prefetching reads the right pages, and streamed rows are those of the clients."""

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
from fedexp.data.streaming import StreamedFederation, on_device, prefetch_pages

ROWS = 2**15  # per client, of 64 bytes each: 2 MB, so that clients share no pages
FAR = [3, 40, 41, 77]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A hundred clients in a file on disk, evicted from the page cache."""
    path = tmp_path / "federation.npz"
    x = torch.zeros(100 * ROWS, 64, dtype=torch.uint8)
    Federation({"x": x}, np.arange(101) * ROWS).save(path)
    evict(path)
    return path


def evict(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def in_memory(federation: Federation) -> list[int]:
    """Return the clients whose middle row is in the page cache, without reading it."""
    begin, found = federation.fields["x"].data_ptr(), ctypes.c_ubyte()
    ask, clients = ctypes.CDLL(None).mincore, []
    for client in range(federation.clients):
        at = (begin + client * ROWS * 64 + ROWS * 32) // mmap.PAGESIZE * mmap.PAGESIZE
        assert ask(ctypes.c_void_p(at), ctypes.c_size_t(1), ctypes.byref(found)) == 0
        clients += [client] if found.value & 1 else []
    return clients


@pytest.mark.skipif(sys.platform != "linux", reason="needs mincore")
def test_only_the_clients_pages_are_read(saved: Path) -> None:
    federation = Federation.open(saved)
    if in_memory(federation):
        pytest.skip("this file system is in memory")
    assert prefetch_pages(federation, np.array(FAR)) >= len(FAR) * ROWS * 64
    tries = 0
    while in_memory(federation) != FAR and tries < 500:  # the system reads on its own
        tries += 1
        time.sleep(0.01)
    assert in_memory(federation) == FAR


def test_adjacent_pages_are_requested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small clients share pages, and adjacent clients need one call."""
    calls: list[tuple[int, int]] = []
    advise = lambda at, size, how: calls.append((at, size))  # noqa: E731
    monkeypatch.setattr(streaming, "madvise", lambda: advise)
    page = mmap.PAGESIZE
    x = torch.zeros(100 * page, dtype=torch.uint8)
    federation = Federation({"x": x}, np.arange(401) * (page // 4))
    begin = x.data_ptr()
    prefetch_pages(federation, np.array([0, 1, 2, 3, 4, 200, 203, 399]))
    for client in (0, 4, 200, 203, 399):
        first, last = begin + client * (page // 4), begin + (client + 1) * (page // 4)
        assert any(at <= first and last <= at + size for at, size in calls)
    assert len(calls) == 3
    assert all(at % page == 0 and size <= 3 * page for at, size in calls)


def test_prefetching_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "MAX_PREFETCH", 3 * mmap.PAGESIZE)
    x = torch.zeros(10 * mmap.PAGESIZE, dtype=torch.uint8)
    federation = Federation({"x": x}, np.arange(11) * mmap.PAGESIZE)
    assert prefetch_pages(federation, np.arange(10)) == 3 * mmap.PAGESIZE


def unequal(target: str = "cpu") -> tuple[Federation, StreamedFederation]:
    x = torch.arange(30.0).reshape(15, 2)
    plain = Federation({"x": x, "y": torch.arange(15)}, np.array([0, 4, 5, 9, 15]))
    device = torch.device(target)
    return plain, StreamedFederation(plain.fields, plain.offsets, device, finite=True)


@pytest.mark.parametrize("prefetched", [False, True])
def test_cohort_rows_are_in_the_order_of_clients(prefetched: bool) -> None:
    plain, streamed = unequal()
    chosen = [1, 3]
    if prefetched:
        streamed.prefetch(chosen)
    rows = streamed.cohort_rows(chosen)
    for client, at in zip(chosen, streamed.first_rows(np.array(chosen)), strict=True):
        for name, value in plain.client(client).items():
            assert torch.equal(rows[name][at : at + len(value)], value)


def test_cohorts_of_one_size_get_the_same_number_of_rows() -> None:
    _, streamed = unequal()
    sizes = {len(streamed.cohort_rows(chosen)["x"]) for chosen in ([0, 1], [1, 2], [2, 3])}
    assert sizes == {4 + 6}


def test_rows_prefetched_for_another_cohort_are_not_used() -> None:
    plain, streamed = unequal()
    streamed.prefetch([0, 1])
    assert torch.equal(streamed.cohort_rows([2])["y"][:4], plain.client(2)["y"])


def test_batches_are_on_the_device() -> None:
    _, streamed = unequal("meta")
    assert streamed.device.type == "meta"
    for batch in (
        streamed.client(1),
        streamed.batch(2, np.array([0, 3])),
        streamed.cohort_rows([1]),
    ):
        assert {value.device.type for value in batch.values()} == {"meta"}


def test_data_that_fit_are_not_streamed() -> None:
    plain, _ = unequal()
    assert type(on_device(plain, torch.device("cpu"))) is Federation


def test_data_checked_before_saving_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a federation larger than memory would dominate a short run."""
    plain, _ = unequal()
    plain.save(tmp_path / "saved.npz")
    arrays = {name: value.numpy() for name, value in plain.fields.items()}
    cache.write(tmp_path / "other.npz", {**arrays, "offsets": plain.offsets})
    read: list[str] = []
    monkeypatch.setattr(federation, "check_finite", lambda fields: read.append("all"))
    on_device(Federation.open(tmp_path / "saved.npz"), torch.device("cpu"))
    assert not read
    Federation.open(tmp_path / "other.npz")
    assert read == ["all"]
