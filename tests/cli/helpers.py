"""Shared by the tests of stored runs on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedexp.cli.options import experiment_of
from fedexp.experiment import Resources
from fedexp.runs import RunInterrupted, Storage, execute, folder_of
from fedexp_command.parsers import build_parser
from tests.helpers.processes import LONGEST
from tests.runs.helpers import stop_after

SMALL = ["--set", "task.clients=4", "--set", "task.rows=3", "--set", "task.dim=20"]
RUN = ["run", "synthetic", "--rounds", "5", *SMALL]
FEDEXP = [sys.executable, "-m", "fedexp"]


def wait_for_rows(folder: Path, process: subprocess.Popen[str]) -> Path:
    """Return the run folder of a process, once it has some rows."""

    def rows() -> int:
        return sum(each.read_bytes().count(b"\n") for each in folder.glob("*/records.jsonl"))

    wait_until(lambda: rows() >= 3, process)
    return next(folder.glob("*/records.jsonl")).parent


def wait_until(so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a process does; it must not end before, nor take for ever."""
    deadline = time.monotonic() + LONGEST
    while not so():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < deadline, "the run does not get on"
        time.sleep(0.02)


def checkpointed(folder: Path) -> int:
    return int(json.loads((folder / "checkpoint.json").read_text())["round"])


def begin(command: list[str], root: Path, round: int) -> None:
    """Leave what `fedexp run` does when it is stopped after a round."""
    experiment = experiment_of(build_parser().parse_args(command))
    listen, stop = stop_after(round)
    with pytest.raises(RunInterrupted):
        execute(experiment, Storage(folder_of(experiment, root)), listen, Resources(stop=stop))
