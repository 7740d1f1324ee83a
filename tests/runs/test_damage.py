"""Files that are not as they were written: a clear line, and nothing earlier lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedexp as fx
from fedexp.runs import RunWarning, Stopped, execute, load_run
from fedexp.runs.checkpoint import BEFORE, NEWEST
from tests.runs.helpers import essence, interrupted, nobody, stop_after, tiny


def test_a_damaged_line_in_the_middle_is_refused_and_nothing_lost(tmp_path: Path) -> None:
    interrupted(tiny(), tmp_path / "a", 4)
    path = tmp_path / "a" / "records.jsonl"
    lines = path.read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], lines[1].replace(b'"', b"'"), *lines[2:]])
    path.write_bytes(damaged)
    with pytest.raises(fx.UsageError, match=r"records\.jsonl is damaged at line 2"):
        execute(tiny(), None, nobody, folder=tmp_path / "a")
    with pytest.raises(fx.UsageError, match="damaged at line 2"):
        load_run(tmp_path / "a")
    assert path.read_bytes() == damaged
    path.write_bytes(lines[0] + b"\n")
    with pytest.raises(fx.UsageError, match="shorter than its checkpoint says"):
        execute(tiny(), None, nobody, folder=tmp_path / "a")


@pytest.mark.parametrize("harm", ["cut", "garbled", "no list"])
def test_a_damaged_last_line_costs_the_rounds_after_the_checkpoint_before(
    harm: str, tmp_path: Path
) -> None:
    """After a clean stop the newest checkpoint is of the last line."""
    folder = tmp_path / "a"
    execute(tiny(), None, nobody, folder=tmp_path / "whole")
    interrupted(tiny(), folder, 2)
    interrupted(tiny(), folder, 5)
    path = folder / "records.jsonl"
    data = path.read_bytes()
    if harm == "no list":
        (folder / NEWEST).unlink()
    else:
        path.write_bytes(data[:-9] if harm == "cut" else data[:-9] + b"########\n")
    with pytest.warns(RunWarning, match="resuming from the one before, of round 2"):
        assert execute(tiny(), None, nobody, folder=folder).stored == 2
    assert essence(folder) == essence(tmp_path / "whole")


def test_a_finished_run_that_lost_its_last_line_is_refused(tmp_path: Path) -> None:
    execute(tiny(), None, nobody, folder=tmp_path / "a")
    path = tmp_path / "a" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(fx.UsageError, match=r"records\.jsonl has 5 of 6 rows; .*--restart"):
        execute(tiny(), None, nobody, folder=tmp_path / "a")
    assert len(execute(tiny(), None, nobody, folder=tmp_path / "a", restart=True).rows) == 6


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(harm: str, tmp_path: Path) -> None:
    spec, folder = tiny("scaffold-exp"), tmp_path / "a"
    execute(spec, None, nobody, folder=tmp_path / "whole")
    listen, wish = stop_after(4)
    with pytest.raises(Stopped):
        execute(spec, None, listen, folder=folder, stop=wish, checkpoint_every=0)
    file = folder / json.loads((folder / NEWEST).read_text())["model"]["file"]
    data = bytearray(file.read_bytes())
    data[-5] ^= 64
    file.write_bytes(data[:100] if harm == "truncated" else bytes(data))
    with pytest.warns(RunWarning, match="resuming from the one before, of round 3"):
        outcome = execute(spec, None, nobody, folder=folder)
    assert outcome.stored == 3
    assert essence(folder) == essence(tmp_path / "whole")


def test_without_a_whole_checkpoint_nothing_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    interrupted(tiny(), folder, 3)
    (folder / NEWEST).write_text("{")
    assert not (folder / BEFORE).exists()
    rows = (folder / "records.jsonl").read_bytes()
    with pytest.raises(fx.UsageError, match=r"nothing was changed; .* start over with --restart"):
        execute(tiny(), None, nobody, folder=folder)
    assert (folder / "records.jsonl").read_bytes() == rows
    execute(tiny(), None, nobody, folder=folder, restart=True)
    execute(tiny(), None, nobody, folder=tmp_path / "whole")
    assert essence(folder) == essence(tmp_path / "whole")
