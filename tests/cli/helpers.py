"""What the tests of kept runs on the command line share."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedexp.cli.main import build_parser
from fedexp.cli.options import spec_of
from fedexp.runs import Stopped, execute
from tests.runs.helpers import stop_after

SMALL = ["--set", "task.clients=4", "--set", "task.rows=3", "--set", "task.dim=20"]
RUN = ["run", "synthetic", "--rounds", "5", *SMALL]
FEDEXP = [sys.executable, "-m", "fedexp"]


def wait_for_rows(folder: Path, process: subprocess.Popen[str]) -> Path:
    """The run that the process has begun, once it has some rows."""
    while process.poll() is None:
        found = list(folder.glob("*/records.jsonl"))
        if found and found[0].read_bytes().count(b"\n") >= 3:
            return found[0].parent
        time.sleep(0.02)
    raise AssertionError("the run ended by itself")


def checkpointed(folder: Path) -> int:
    return int(json.loads((folder / "checkpoint.json").read_text())["round"])


def begin(command: list[str], folder: Path, round: int) -> None:
    """What `fedexp run` leaves when it is stopped after a round."""
    parser = build_parser()
    args = parser.parse_args(command)
    listen, wish = stop_after(round)
    with pytest.raises(Stopped):
        execute(spec_of(args, args.algorithm, args.seed), folder, listen, stop=wish)
