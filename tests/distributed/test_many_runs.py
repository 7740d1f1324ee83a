"""Many runs, or trials, over ranks: each is executed once, and all ranks get all results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedexp.cli.main import main
from fedexp.runs import find_runs
from fedexp.tuning.grids import points
from tests.cli.helpers import SMALL
from tests.distributed import many_runs
from tests.distributed.many_runs import CASES, FEW, GRID, WORLD
from tests.helpers.processes import finished

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COMPARE = ["compare", "synthetic", "--algorithms", "fedavg,fedexp", "--rounds", "5", *SMALL]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what each rank started and found, by case."""
    folder = tmp_path_factory.mktemp("many")
    done = finished([sys.executable, many_runs.__file__, str(folder)])
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one process finds."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: case(folder, None) for name, case in CASES.items() if name != "free"}


def flat(value: Any) -> list[Any]:
    """Return all numbers and texts of a nested value, in order."""
    if isinstance(value, dict):
        return [leaf for name, each in value.items() for leaf in (name, *flat(each))]
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list) else [value]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_find_the_same(found: Found, name: str) -> None:
    assert [own[name][1] for own in found] == [found[0][name][1]] * WORLD


@pytest.mark.parametrize("name", [name for name in CASES if name != "free"])
def test_ranks_find_what_one_process_finds(found: Found, alone: dict[str, Any], name: str) -> None:
    ours, its = flat(found[0][name][1]), flat(alone[name][1])
    assert len(ours) == len(its)
    for mine, other in zip(ours, its, strict=True):
        close = isinstance(other, float)
        assert mine == (pytest.approx(other, rel=1e-9, abs=1e-12) if close else other)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("whole", [["0", "3"], ["1", "4"], ["2"]]),
        (
            "fewer left",
            [["5", "6"], [], []],
        ),  # one after another on all ranks; only the first reports rows
        ("enough left", [["7"], ["8"], ["9"]]),
        ("again", [[], [], []]),
        ("in memory", [["0", "3"], ["1"], ["2"]]),
    ],
)
def test_which_rank_executes_which_run(found: Found, name: str, shares: list[list[str]]) -> None:
    assert [own[name][0] for own in found] == shares


def test_a_whole_run_on_a_rank_has_the_bits_of_one_alone(
    found: Found, alone: dict[str, Any]
) -> None:
    assert found[0]["whole"][1] == json.loads(json.dumps(alone["whole"][1]))


def test_every_trial_is_run_once(found: Found) -> None:
    assert all(own["grid"][0] for own in found)
    started = [point for own in found for point in own["grid"][0]]
    assert sorted(started) == sorted(json.dumps(point) for point in points(GRID))
    assert [own["few"][0] for own in found] == [[json.dumps(p) for p in points(FEW)], [], []]
    in_memory = [json.dumps(point) for point in points(GRID)]
    assert [own["grid in memory"][0] for own in found] == [in_memory, [], []]
    free = [point for own in found for point in own["free"][0]]
    assert len(free) == len(set(free)) == len(found[0]["free"][1]) == 5


def test_a_run_or_all_runs_stop_on_all_ranks(found: Found) -> None:
    assert [own["stopped run"][0] for own in found] == [["2"], ["0"], ["0"]]
    first, second = found[0]["stopped run"][1]
    assert first == "stopped"
    assert len(second) == 6
    for name in ("interrupted", "interrupted and stored"):
        assert [own[name][1] for own in found] == ["stopped"] * WORLD


def test_compare_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The table of one process; then a rank that fails ends the job, with one line."""
    monkeypatch.chdir(tmp_path)
    assert main([*COMPARE, "--no-save", "--jobs", "1"]) == 0
    ranked = [*TORCHRUN, "2", "-m", "fedexp", *COMPARE, "--runs", "runs"]
    done = finished(ranked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == capfd.readouterr().out
    assert "wrote compare-synthetic.png" in done.stderr
    (second,) = [each for each in find_runs([tmp_path / "runs"]) if "fedexp" in each.name]
    (second / "result.json").unlink()
    spec = second / "spec.toml"
    spec.write_text(spec.read_text().replace("seed = 0", "seed = 1"))
    (first,) = [each for each in find_runs([tmp_path / "runs"]) if "fedavg" in each.name]
    (first / "result.json").unlink()
    failed = finished(ranked)
    assert failed.returncode != 0
    lines = [line for line in failed.stderr.splitlines() if line.startswith("fedexp: ")]
    assert len(lines) == 1
    assert lines[0].startswith("fedexp: error: rank 1: ")
    assert "has been changed since the run began" in lines[0]
    assert failed.stdout == ""
