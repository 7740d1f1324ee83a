"""Faults of disks, files and processes: one line for the user, and nothing lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedexp as fx
from fedexp.runs import RunWarning, load_run
from fedexp.runs.checkpoint import BEFORE, NEWEST
from fedexp.runs.records import RECORDS, RecordFile
from tests.helpers.processes import finished
from tests.runs.helpers import essence, execute_in, interrupted, tiny, untimed

Change = Callable[..., Any]
KILLER = Path(__file__).with_name("killer.py")


class PowerCut(BaseException):
    """Nothing catches it."""


def cut_power_at(step: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every change on the disk counts as a step; at the given one the process ends.

    Odd steps end before the change, even ones after it, and lines are half written.
    """
    steps: list[str] = []

    def risky(name: str, change: Change, half: Change) -> Change:
        def changed(*arguments: Any, **more: Any) -> Any:
            steps.append(name)
            if len(steps) == step:
                half(*arguments)
                raise PowerCut
            result = change(*arguments, **more)
            steps.append(name)
            if len(steps) == step:
                raise PowerCut
            return result

        return changed

    def half_a_line(records: RecordFile, row: dict[str, Any]) -> None:
        with records.path.open("ab") as file:
            file.write(b'{"round": 1, "serv')

    nothing: Change = lambda *arguments: None  # noqa: E731
    monkeypatch.setattr(os, "replace", risky("replace", os.replace, nothing))
    monkeypatch.setattr(Path, "unlink", risky("unlink", Path.unlink, nothing))
    monkeypatch.setattr(RecordFile, "append", risky("append", RecordFile.append, half_a_line))
    return steps


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_cut_at_any_step_changes_nothing_in_the_end(tmp_path: Path, where: str) -> None:
    """Every file operation of a whole run, one by one."""
    experiment = tiny("scaffold-exp", 3)
    how: dict[str, Any] = {"checkpoint_every": 0, "client_store": where}
    execute_in(tmp_path / "whole", experiment, **how)
    expected, files = essence(tmp_path / "whole"), sorted(os.listdir(tmp_path / "whole"))
    step, ended = 0, False
    while not ended:
        step += 1
        folder = tmp_path / str(step)
        with pytest.MonkeyPatch.context() as patch:
            cut_power_at(step, patch)
            try:
                execute_in(folder, experiment, **how)
                ended = True
            except PowerCut:
                pass
        execute_in(folder, experiment, **how)
        assert essence(folder) == expected
        assert sorted(os.listdir(folder)) == files  # and nothing else is left
        shutil.rmtree(folder)
    assert step > 40  # it really went through all of them


@pytest.mark.parametrize(("where", "moments"), [("memory", 20), ("disk", 12)])
def test_killed_at_random_moments(tmp_path: Path, where: str, moments: int) -> None:
    """Real processes, really killed; the driver prints the number of rows at every kill."""
    done = finished([sys.executable, str(KILLER), str(tmp_path), str(moments), "7", where])
    assert done.returncode == 0, done.stderr
    kills = [int(word) for word in done.stdout.split()]
    assert len(kills) == moments
    assert len(set(kills)) > moments / 4  # at many different rounds
    assert essence(tmp_path / "killed") == essence(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".*.tmp"))


def test_a_cut_during_a_restart_can_be_resumed(tmp_path: Path) -> None:
    experiment = tiny("scaffold-exp", 3)
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, tmp_path / "started", 2, checkpoint_every=0)
    backwards: Change = lambda path: (path / n for n in sorted(os.listdir(path), reverse=True))  # noqa: E731
    for step in range(1, 25):
        folder = shutil.copytree(tmp_path / "started", tmp_path / str(step))
        with pytest.MonkeyPatch.context() as patch:
            cut_power_at(step, patch)
            patch.setattr(Path, "iterdir", backwards)  # an order that no file system promises
            with pytest.raises(PowerCut):
                execute_in(folder, experiment, restart=True)
        execute_in(folder, experiment)
        assert essence(folder) == essence(tmp_path / "whole")


def failing_from(call: int, code: int) -> Callable[[int], None]:
    """`os.fsync` of a disk that takes no more from the given call on."""
    fsync, count = os.fsync, iter(range(1, 1000))

    def full(handle: int) -> None:
        if next(count) >= call:
            raise OSError(code, os.strerror(code))
        fsync(handle)

    return full


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_disk_is_reported_and_loses_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, folder = tiny("scaffold-exp"), tmp_path / "a"
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, folder, 3)
    before = load_run(folder)
    for fails in (1, 2, 3, 4, 9):  # the first is the note that it was resumed
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing_from(fails, code))
            message = f"cannot write to {folder}: {os.strerror(code)}"
            with pytest.raises(fx.UsageError, match=message):
                execute_in(folder, experiment, checkpoint_every=0)
        assert untimed(load_run(folder).rows)[:3] == untimed(before.rows)
        assert not list(folder.glob(".*.tmp"))
    execute_in(folder, experiment)
    assert essence(folder) == essence(tmp_path / "whole")


def test_a_full_disk_in_the_middle_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"

    def full(records: RecordFile, row: dict[str, Any]) -> None:
        if row["round"] == 3:
            with records.path.open("ab") as file:
                file.write(b'{"round": 3, "ser')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(records, row)

    append = RecordFile.append
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "append", full)
        with pytest.raises(fx.UsageError, match="No space left on device"):
            execute_in(folder, tiny(), checkpoint_every=0)
    assert [row["round"] for row in load_run(folder).rows] == [1, 2]
    assert execute_in(folder, tiny()).stored == 2


def test_a_line_refused_by_a_full_disk_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real file that may not grow, as a disk takes part of a line and then no more."""
    folder = tmp_path / "a"
    interrupted(tiny(), folder, 3)
    before = (folder / "records.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, hard))
    try:
        with pytest.raises(fx.UsageError, match=f"cannot write to {folder}: File too large"):
            execute_in(folder, tiny())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "records.jsonl").read_bytes().startswith(before)
    assert execute_in(folder, tiny()).stored == 3


def test_no_folder_can_be_made_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(fx.UsageError, match=r"cannot write to .*file/run: Not a directory"):
        execute_in(tmp_path / "file" / "run", tiny())


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, str(KILLER), "hold", str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        with pytest.raises(fx.UsageError, match=f"another process is working on {folder}"):
            execute_in(folder, tiny())
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert len(execute_in(folder, tiny()).rows) == 6


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def unsupported(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(fx.UsageError, match="cannot lock "):
        execute_in(tmp_path / "a", tiny())


def test_a_mistake_that_shows_in_the_first_round_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedexp.engine import simulation

    def refuse(*arguments: Any) -> None:
        raise fx.UsageError("this model cannot be batched")

    monkeypatch.setattr(simulation, "run_round", refuse)
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "new" / "deep", tmp_path / "mine"):
        with pytest.raises(fx.UsageError, match="cannot be batched"):
            execute_in(folder, tiny())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert not list((tmp_path / "mine").iterdir())


def test_a_damaged_line_in_the_middle_is_refused_and_nothing_lost(tmp_path: Path) -> None:
    interrupted(tiny(), tmp_path / "a", 4)
    path = tmp_path / "a" / "records.jsonl"
    lines = path.read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], lines[1].replace(b'"', b"'"), *lines[2:]])
    path.write_bytes(damaged)
    with pytest.raises(fx.UsageError, match=r"records\.jsonl is damaged at line 2"):
        execute_in(tmp_path / "a", tiny())
    with pytest.raises(fx.UsageError, match="damaged at line 2"):
        load_run(tmp_path / "a")
    assert path.read_bytes() == damaged
    path.write_bytes(lines[0] + b"\n")
    with pytest.raises(fx.UsageError, match="shorter than its checkpoint records"):
        execute_in(tmp_path / "a", tiny())


@pytest.mark.parametrize("harm", ["cut", "garbled", "no list"])
def test_a_damaged_last_line_costs_the_rounds_after_the_checkpoint_before(
    harm: str, tmp_path: Path
) -> None:
    """After a clean stop the newest checkpoint is of the last line."""
    folder = tmp_path / "a"
    execute_in(tmp_path / "whole", tiny())
    interrupted(tiny(), folder, 2)
    interrupted(tiny(), folder, 5)
    path = folder / "records.jsonl"
    data = path.read_bytes()
    if harm == "no list":
        (folder / NEWEST).unlink()
    else:
        path.write_bytes(data[:-9] if harm == "cut" else data[:-9] + b"########\n")
    with pytest.warns(RunWarning, match="resuming from the one before, of round 2"):
        assert execute_in(folder, tiny()).stored == 2
    assert essence(folder) == essence(tmp_path / "whole")


def test_a_finished_run_that_lost_its_last_line_is_refused(tmp_path: Path) -> None:
    execute_in(tmp_path / "a", tiny())
    path = tmp_path / "a" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(fx.UsageError, match=r"records\.jsonl has 5 of 6 rows"):
        execute_in(tmp_path / "a", tiny())
    assert len(execute_in(tmp_path / "a", tiny(), restart=True).rows) == 6


@pytest.mark.parametrize("harm", ["truncated", "flipped"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(harm: str, tmp_path: Path) -> None:
    experiment, folder = tiny("scaffold-exp"), tmp_path / "a"
    execute_in(tmp_path / "whole", experiment)
    interrupted(experiment, folder, 4, checkpoint_every=0)
    file = folder / json.loads((folder / NEWEST).read_text())["model"]["file"]
    data = bytearray(file.read_bytes())
    data[-5] ^= 64
    file.write_bytes(data[:100] if harm == "truncated" else bytes(data))
    with pytest.warns(RunWarning, match="resuming from the one before, of round 3"):
        outcome = execute_in(folder, experiment)
    assert outcome.stored == 3
    assert essence(folder) == essence(tmp_path / "whole")


def test_without_a_whole_checkpoint_nothing_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    interrupted(tiny(), folder, 3)
    (folder / NEWEST).write_text("{")
    assert not (folder / BEFORE).exists()
    rows = (folder / "records.jsonl").read_bytes()
    with pytest.raises(fx.UsageError, match=r"nothing was changed"):
        execute_in(folder, tiny())
    assert (folder / "records.jsonl").read_bytes() == rows
    execute_in(folder, tiny(), restart=True)
    execute_in(tmp_path / "whole", tiny())
    assert essence(folder) == essence(tmp_path / "whole")


def flip_digit(folder: Path, round: int) -> None:
    """Change a number in the row of a round, so that it is still a row."""
    path = folder / RECORDS
    lines = path.read_bytes().split(b"\n")
    at = lines[round - 1].index(b'"train_loss": ') + len(b'"train_loss": ')
    flipped = bytes([lines[round - 1][at] ^ 1])
    lines[round - 1] = lines[round - 1][:at] + flipped + lines[round - 1][at + 1 :]
    path.write_bytes(b"\n".join(lines))


def test_a_flipped_digit_in_a_row_is_noticed(tmp_path: Path) -> None:
    execute_in(tmp_path / "whole", tiny())
    folder = tmp_path / "a"
    interrupted(tiny(), folder, 4, checkpoint_every=0)
    intact = (folder / RECORDS).read_bytes()
    flip_digit(folder, 2)  # in the rows of both checkpoints
    with pytest.raises(fx.UsageError, match=r"records\.jsonl is not as it was written, and there"):
        execute_in(folder, tiny())
    (folder / RECORDS).write_bytes(intact)
    flip_digit(folder, 4)
    with pytest.warns(RunWarning, match="resuming from the one before, of round 3"):
        assert execute_in(folder, tiny()).stored == 3
    assert essence(folder) == essence(tmp_path / "whole")
