"""Downloading, checking and unpacking archives, from a server on this machine."""

import functools
import http.server
import io
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.data import datasets
from fedexp.data.datasets import load
from fedexp.data.sources.cifar import CIFAR10
from fedexp.data.sources.cinic import CINIC10
from fedexp.data.sources.download import Source, check_archive, data_folder, fetch, unpack
from fedexp.data.sources.emnist import EMNIST
from tests.helpers.errors import assert_refused
from tests.helpers.generated_data import as_published

Write = Callable[[Path], dict[str, Any]]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder that the server serves."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


@pytest.fixture
def mirror(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a server that serves the folder."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def pack(source: Source, content: Path, archive: Path) -> Source:
    """Pack a data set like its official archive, and return the source of this archive."""
    kind = archive.suffix[1:]
    with tarfile.open(archive, f"w:{kind}") as tar:  # type: ignore[call-overload]
        for entry in source.entries:
            tar.add(content / source.into / entry, entry)
    return as_published(source, archive)


@pytest.fixture
def small_cifar10(site: Path, tmp_path: Path, write_cifar10: Write) -> Source:
    """A small CIFAR-10 archive on the server."""
    write_cifar10(tmp_path / "made")
    return pack(CIFAR10, tmp_path / "made", site / CIFAR10.archive)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_fetch_downloads_checks_and_unpacks(
    small_cifar10: Source, mirror: str, tmp_path: Path
) -> None:
    data = tmp_path / "new" / "data"
    assert fetch(small_cifar10, data, mirror + "/") == data / CIFAR10.archive
    assert names(data) == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]
    assert len(load("cifar10", data).train["y"]) == 50
    fetch(small_cifar10, data, "http://127.0.0.1:9")  # nothing left to download


def test_an_existing_archive_is_used(
    small_cifar10: Source, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        datasets.DATASETS, "cifar10", replace(datasets.DATASETS["cifar10"], source=small_cifar10)
    )
    assert len(load("cifar10", site).train["y"]) == 50


@pytest.mark.parametrize(("source", "writer"), [(CINIC10, "cinic10"), (EMNIST, "emnist")])
def test_archives_are_unpacked_where_files_are_located(
    source: Source, writer: str, site: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    expected = request.getfixturevalue(f"write_{writer}")(tmp_path / "made")
    unpack(pack(source, tmp_path / "made", site / source.archive), site)
    raw = datasets.load(source.name, site)
    np.testing.assert_array_equal(raw.train["x"], expected["train_x"])


def test_a_wrong_checksum_leaves_nothing(
    small_cifar10: Source, mirror: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    wrong = replace(small_cifar10, checksum="md5 " + "0" * 32)
    assert_refused(lambda: fetch(wrong, data, mirror), CIFAR10.archive, "wrong checksum, md5")
    assert names(data) == []


def test_a_wrong_checksum_on_disk_is_named(small_cifar10: Source, site: Path) -> None:
    wrong = replace(small_cifar10, checksum="md5 " + "0" * 32)
    assert_refused(lambda: unpack(wrong, site), str(site / CIFAR10.archive), "wrong checksum, md5")
    assert names(site) == [CIFAR10.archive]


@pytest.mark.parametrize("keep", [0, 100, 0.5, -20])
def test_a_truncated_archive_is_named(small_cifar10: Source, site: Path, keep: float) -> None:
    path = site / CIFAR10.archive
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if keep == 0.5 else int(keep)])
    assert_refused(lambda: unpack(small_cifar10, site), str(path), "truncated")
    published = as_published(small_cifar10, path)
    assert_refused(lambda: unpack(published, site), str(path), "truncated or damaged archive")
    assert names(site) == [CIFAR10.archive]


def test_a_truncated_archive_is_downloaded_again(
    small_cifar10: Source, mirror: str, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / CIFAR10.archive).write_bytes(b"cut sh")
    fetch(small_cifar10, data, mirror)
    assert check_archive(small_cifar10, data / CIFAR10.archive) == small_cifar10.checksum


def test_without_network_the_error_names_the_remedy(tmp_path: Path) -> None:
    start = time.perf_counter()
    assert_refused(
        lambda: fetch(CIFAR10, tmp_path / "data", "http://127.0.0.1:9"),
        "cifar-10-python.tar.gz (170,498,071 bytes, md5 c58f30108f718f92721af3b95e74349a)",
        f"put it in {tmp_path / 'data'}",
    )
    assert time.perf_counter() - start < 20
    assert names(tmp_path / "data") == []


def test_a_file_missing_on_the_server(mirror: str, tmp_path: Path) -> None:
    assert_refused(lambda: fetch(CINIC10, tmp_path, mirror), "HTTPError", "687,544,992 bytes")


def test_an_archive_of_unpublished_size_is_verified(
    site: Path, mirror: str, tmp_path: Path, write_emnist: Write
) -> None:
    write_emnist(tmp_path / "made")
    source = replace(pack(EMNIST, tmp_path / "made", site / EMNIST.archive), size=None)
    data = tmp_path / "data"
    archive = fetch(source, data, mirror)
    assert check_archive(source, archive) == source.checksum
    assert load("emnist", data).federation().clients == 5
    archive.write_bytes(archive.read_bytes() + b"!")
    assert_refused(lambda: check_archive(source, archive), str(archive), "wrong checksum, sha256")


def test_python_without_safe_extraction_is_refused(
    small_cifar10: Source, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    assert_refused(
        lambda: unpack(small_cifar10, site), "Python 3.11.4", str(site / CIFAR10.archive)
    )
    assert names(site) == [CIFAR10.archive]


def evil_file(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = 4
    return member


def evil_link(name: str, to: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


EVIL = {
    "above": evil_file("../escaped"),
    "deep above": evil_file("cifar-10-batches-py/../../escaped"),
    "link": evil_link("cifar-10-batches-py", "..", tarfile.SYMTYPE),
    "hard link": evil_link("cifar-10-batches-py/x", "/etc/hostname", tarfile.LNKTYPE),
    "device": evil_link("cifar-10-batches-py/x", "", tarfile.CHRTYPE),
    "pipe": evil_link("cifar-10-batches-py/x", "", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("what", EVIL)
def test_an_unsafe_archive_is_refused(what: str, site: Path, tmp_path: Path) -> None:
    with tarfile.open(site / CIFAR10.archive, "w:gz") as tar:
        tar.addfile(EVIL[what], io.BytesIO(b"evil") if EVIL[what].size else None)
    published = as_published(CIFAR10, site / CIFAR10.archive)
    assert_refused(lambda: unpack(published, site), str(site / CIFAR10.archive))
    assert names(site) == [CIFAR10.archive]
    assert names(tmp_path) == ["site"]


def test_another_archive_is_refused(site: Path, tmp_path: Path, write_cifar100: Write) -> None:
    write_cifar100(tmp_path / "made")
    with tarfile.open(site / CIFAR10.archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "cifar-100-python", "cifar-100-python")
    published = as_published(CIFAR10, site / CIFAR10.archive)
    assert_refused(lambda: unpack(published, site), "has no 'cifar-10-batches-py'")
    assert names(site) == [CIFAR10.archive]


def test_a_folder_that_cannot_be_written_is_named(
    site: Path, tmp_path: Path, write_cinic10: Write
) -> None:
    write_cinic10(tmp_path / "made")
    source = pack(CINIC10, tmp_path / "made", site / CINIC10.archive)
    (site / "CINIC-10").write_text("a file in the way")
    assert_refused(lambda: unpack(source, site), f"cannot unpack {site / CINIC10.archive} (")
    assert names(site) == ["CINIC-10", CINIC10.archive]


def test_the_data_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEXP_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    assert data_folder("here") == Path("here")
    monkeypatch.delenv("FEDEXP_DATA")
    assert data_folder().name == "fedexp"
    assert data_folder().is_absolute()


def test_an_unknown_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEXP_DATA", "~nosuchuser/x")
    assert_refused(data_folder, "~nosuchuser/x", "set FEDEXP_DATA to a full path")
