"""`fedexp data list | fetch | verify | show`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedexp.cli.data import class_counts, draw, run
from fedexp.cli.main import main
from fedexp.data import Federation
from fedexp.errors import UsageError
from fedexp_command.parsers import build_parser
from tests.helpers.errors import assert_refused

Write = Callable[[Path], dict[str, Any]]


@pytest.fixture
def data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `fedexp data ...` and returns its output."""

    def call(command: str, *arguments: str) -> str:
        words = ["data", command, *arguments, "--folder", str(tmp_path)]
        assert run(build_parser().parse_args(words)) == 0
        return capsys.readouterr().out

    return call


def test_list_shows_what_the_folder_has(
    data: Callable[..., str], tmp_path: Path, write_cifar10: Write
) -> None:
    lines = {line.split()[0]: line for line in data("list").splitlines()[2:]}
    assert lines.keys() == {"cifar10", "cifar100", "cinic10", "emnist", "mnist", "shakespeare"}
    assert lines["cifar10"].endswith(" no")
    write_cifar10(tmp_path)
    data("show", "cifar10", "--clients", "5")
    listed = next(line for line in data("list").splitlines() if line.startswith("cifar10 "))
    assert listed.split()[:5] == ["cifar10", "10", "50,000", "10,000", "170"]
    assert "files, cache (" in listed


@pytest.mark.parametrize(
    ("options", "sizes", "classes"),
    [
        (["--clients", "10", "--alpha", "0.3"], "min 5, median 5, max 5", None),
        (["--clients", "5", "--partition", "iid"], "min 10, median 10, max 10", None),
        (["--clients", "10", "--partition", "shards", "--shards", "1"], "median 5", "mean 1.00"),
        (["--clients", "10", "--partition", "dirichlet-unequal"], "min ", None),
    ],
)
def test_show_prints_statistics_and_a_heat_map(
    data: Callable[..., str],
    tmp_path: Path,
    write_cifar10: Write,
    options: list[str],
    sizes: str,
    classes: str | None,
) -> None:
    write_cifar10(tmp_path)
    printed = data("show", "cifar10", *options)
    assert f"clients             {options[1]}\n" in printed
    assert sizes in printed
    assert classes is None or classes in printed
    assert printed.count("|\n") == 10  # one line per class
    assert data("show", "cifar10", *options) == printed


def test_show_depends_on_the_seed(
    data: Callable[..., str], tmp_path: Path, write_cifar10: Write
) -> None:
    write_cifar10(tmp_path)
    shown = {data("show", "cifar10", "--clients", "5", "--seed", seed) for seed in "012"}
    assert len(shown) == 3


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_show_draws(
    data: Callable[..., str], tmp_path: Path, write_emnist: Write, ending: str
) -> None:
    write_emnist(tmp_path)
    out = tmp_path / f"clients.{ending}"
    printed = data("show", "emnist", "--out", str(out))
    assert "emnist, natural partition" in printed
    assert "min 1, median 3, max 12" in printed
    assert out.stat().st_size > 1000


@pytest.mark.parametrize("name", ["clients.nothing", "clients", "in-the-way/clients.png"])
def test_an_unwritable_figure_is_refused_before_loading(
    data: Callable[..., str], tmp_path: Path, write_emnist: Write, name: str
) -> None:
    write_emnist(tmp_path)
    (tmp_path / "in-the-way").write_text("a file")
    assert_refused(
        lambda: data("show", "emnist", "--out", str(tmp_path / name)), "cannot write", name
    )
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("seed", ["-1", "1.5", "x"])
def test_a_seed_must_not_be_negative(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "cifar10", "--seed", seed]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"--seed: must be a whole number from 0, not '{seed}'" in line


def test_verify_reads_files_without_an_archive(
    data: Callable[..., str], tmp_path: Path, write_cifar10: Write
) -> None:
    write_cifar10(tmp_path)
    printed = data("verify", "cifar10")
    assert "50 training and 10 test examples (officially 50,000 and 10,000)" in printed
    assert "archive" not in printed
    data("show", "cifar10", "--clients", "5")
    assert "cache    good" in data("verify", "cifar10")


def test_verify_names_what_is_bad(
    data: Callable[..., str], tmp_path: Path, write_cinic10: Write
) -> None:
    assert_refused(lambda: data("verify", "cinic10"), "cinic10 is not in", "687,544,992 bytes")
    write_cinic10(tmp_path)
    assert "20 training and 20 test examples" in data("verify", "cinic10")
    (tmp_path / "CINIC-10.tar.gz").write_bytes(b"short")
    assert_refused(
        lambda: data("verify", "cinic10"), "CINIC-10.tar.gz: truncated, 5 bytes instead of"
    )
    (tmp_path / "CINIC-10.tar.gz").unlink()
    (tmp_path / "CINIC-10" / "test" / "cat" / "cifar10-06.png").write_text("?")
    assert_refused(lambda: data("verify", "cinic10"), "cifar10-06.png: not an image")
    assert not (tmp_path / "cache").exists()


def test_verify_names_a_missing_file(
    data: Callable[..., str], tmp_path: Path, write_cifar100: Write
) -> None:
    write_cifar100(tmp_path)
    (tmp_path / "cifar-100-python" / "test").unlink()
    assert_refused(lambda: data("verify", "cifar100"), "test: missing")


def test_fetch_without_network(data: Callable[..., str], tmp_path: Path) -> None:
    assert_refused(
        lambda: data("fetch", "cifar100", "--mirror", "http://127.0.0.1:9/"),
        "cifar-100-python.tar.gz (169,001,437 bytes, md5 eb9058c3a382ffc7106e4002c42a8d85)",
        str(tmp_path),
    )


def test_fetch_skips_existing_files(
    data: Callable[..., str], tmp_path: Path, write_cifar10: Write
) -> None:
    write_cifar10(tmp_path)
    assert "its files exist already" in data("fetch", "cifar10")


@pytest.mark.parametrize("command", ["fetch", "verify", "show"])
def test_a_misspelt_name_gets_a_suggestion(data: Callable[..., str], command: str) -> None:
    assert_refused(
        lambda: data(command, "emnits"), "unknown data set 'emnits'; did you mean emnist or mnist?"
    )


def test_natural_clients_are_refused_if_there_are_none(
    data: Callable[..., str], tmp_path: Path, write_cifar10: Write
) -> None:
    write_cifar10(tmp_path)
    assert_refused(
        lambda: data("show", "cifar10", "--partition", "natural"), "has no natural clients"
    )


def test_the_real_data(
    real_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real_folder("cifar10")
    options = ["--clients", "100", "--alpha", "0.3", "--folder", str(folder)]
    assert main(["data", "show", "cifar10", *options]) == 0
    assert "min 500, median 500, max 500" in capsys.readouterr().out


def test_many_clients_are_drawn_as_a_heat_map(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (300, 10))
    draw(counts, tmp_path / "a.png", "many")
    assert (tmp_path / "a.png").stat().st_size > 1000
    with pytest.raises(UsageError, match="cannot write"):
        draw(counts, tmp_path / "a.nothing", "many")


def test_class_counts() -> None:
    federation = Federation.from_ids({"y": np.array([2, 0, 2, 1])}, ["b", "a", "b", "a"])
    assert class_counts(federation, 4).tolist() == [[1, 1, 0, 0], [0, 0, 2, 0]]
