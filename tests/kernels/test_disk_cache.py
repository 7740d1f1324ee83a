"""Cache files are whole or absent, and a cache that cannot be used is none."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from fedexp.kernels.disk_cache import cache_file, read_json, write_json


def write_often(file: Path, number: int) -> None:
    for _ in range(100):
        write_json(file, {"number": number, "text": "x" * 10_000})


def test_files_are_whole_while_processes_write_them(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "file.json"
    write_json(file, {"number": -1, "text": "x" * 10_000})
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        writers = [pool.submit(write_often, file, number) for number in range(2)]
        seen = []
        while not all(each.done() for each in writers):
            seen.append(read_json(file))
        for each in writers:
            each.result()
    seen.append(read_json(file))
    assert all(len(each["text"]) == 10_000 for each in seen)
    assert read_json(file)["number"] in (0, 1)
    assert os.listdir(file.parent) == ["file.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_reads_as_empty_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    assert read_json(file) == {}
    write_json(file, {"a": 1})
    assert read_json(file) == {"a": 1}


def test_without_a_folder_nothing_is_read_written_or_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    write_json(blocked / "file.json", {"a": 1})
    assert read_json(blocked / "file.json") == {}
    assert blocked.read_text() == "a file where the folder should be"

    def homeless() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_file("a.json") is None
    write_json(None, {})
    assert read_json(None) == {}
