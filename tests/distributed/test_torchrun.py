"""Jobs that torchrun starts: stopped, killed, and resumed with another number of ranks.

Also jobs whose ranks are started by hand.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedexp.cli.main import main
from tests.cli.helpers import checkpointed, wait_for_rows, wait_until
from tests.helpers.processes import started
from tests.runs.helpers import untimed

ROUNDS = 600
# More equations than unknowns and a server that never extrapolates: rounding does not grow.
RUN = ["run", "synthetic", "--algorithm", "scaffold", "--rounds", str(ROUNDS), "--cohort", "5"]
SET = ["task.clients=12", "task.rows=4", "task.dim=20", "server.lr=1"]
COMMAND = [*RUN, *(word for each in SET for word in ("--set", each))]


@contextmanager
def torchrun(ranks: int, folder: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Start the command on some ranks, with its run in `folder`; kill whatever is left."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), "-m", "fedexp", *COMMAND]
    options = ["--checkpoint-every", "0", "--runs", str(folder), *more]
    with started([*command, *options], env={"OMP_NUM_THREADS": "1"}) as process:
        yield process


def rank_process(launcher: int, rank: int) -> int:
    """Return the process id of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in map(int, children):
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return child
    raise AssertionError(f"there is no rank {rank}")


def fedexp_lines(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the end of the job and return the lines that fedexp printed to stderr."""
    _, errors = process.communicate(timeout=60)
    assert "fedexp/cli/main.py" not in errors  # the traceback is torchrun's own
    return [line for line in errors.splitlines() if line.startswith("fedexp:")]


NEEDS_PROC = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="looks for ranks in /proc"
)


@NEEDS_PROC
def test_a_stopped_and_killed_job_is_resumed(tmp_path: Path) -> None:
    with torchrun(2, tmp_path / "ranks") as process:
        folder = wait_for_rows(tmp_path / "ranks", process)
        process.send_signal(signal.SIGTERM)
        (line,) = fedexp_lines(process)
    stopped = checkpointed(folder)
    assert f"stopped after round {stopped}; continue with: fedexp resume" in line

    with torchrun(3, tmp_path / "ranks", "--client-states", "disk") as process:
        wait_until(lambda: checkpointed(folder) >= stopped + 5, process)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        begun, line = fedexp_lines(process)
    assert begun.endswith(f"resumes after round {stopped}")
    assert "rank 1 died without an error message" in line
    assert "start the same command again" in line
    assert stopped + 5 <= checkpointed(folder) < ROUNDS

    assert main(["resume", str(folder), "--quiet"]) == 0
    assert main([*COMMAND, "--quiet", "--runs", str(tmp_path / "alone")]) == 0
    assert_same(folder, tmp_path / "alone" / folder.name)


@NEEDS_PROC
def test_ranks_end_if_torchrun_is_killed_before_they_have_joined(tmp_path: Path) -> None:
    with torchrun(2, tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(children.read_text().split()) == 2, process)
        process.kill()
        (line,) = fedexp_lines(process)  # returns when the ranks have closed their output
    assert "torchrun does not answer at" in line
    assert "start the same command again" in line


def test_ranks_started_by_hand_report_an_error_once() -> None:
    """Rank 0 hosts the store: its end must not be an error of its own to rank 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "fedexp", "run", "synthetic", "--algorithm", "fedxp"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(command, env={**common, "RANK": rank, "LOCAL_RANK": rank}))
            for rank in "01"
        ]
        lines = [fedexp_lines(process) for process in ranks]
        statuses = [process.returncode for process in ranks]
    assert [len(each) for each in lines] == [1, 0]
    assert "fedxp" in lines[0][0]
    assert statuses == [2, 2]


def assert_same(folder: Path, other: Path) -> None:
    """Check that two run folders have the same files, and equal rows and models up to rounding."""
    found, expected = (
        untimed([json.loads(line) for line in (each / "records.jsonl").read_text().splitlines()])
        for each in (folder, other)
    )
    assert len(found) == len(expected) == ROUNDS
    for row, wanted in zip(found, expected, strict=True):
        numbers = {name: value for name, value in wanted.items() if value is not None}
        assert {n: row[n] for n in numbers} == pytest.approx(numbers, rel=1e-9, abs=1e-12)
    models = (load_file(each / "model.safetensors")["params"] for each in (folder, other))
    torch.testing.assert_close(*models, rtol=1e-9, atol=1e-12)
    assert {path.name for path in folder.iterdir()} == {path.name for path in other.iterdir()}
