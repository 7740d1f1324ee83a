"""Jobs that torchrun starts: stopped, killed, and gone on with by another number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """The command on so many ranks, which keeps its run in `folder`; nothing of it is left."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(ranks), "-m", "fedexp", *COMMAND]
    kept = ["--checkpoint-every", "0", "--runs", str(folder), *more]
    with started([*command, *kept], env={"OMP_NUM_THREADS": "1"}) as process:
        yield process


def rank_process(launcher: int, rank: int) -> int:
    """The process of a rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in map(int, children):
        if f"RANK={rank}" in Path(f"/proc/{child}/environ").read_text().split("\0"):
            return child
    raise AssertionError(f"there is no rank {rank}")


def told(process: subprocess.Popen[str]) -> list[str]:
    """What fedexp says until the job has ended, which it does by itself."""
    _, errors = process.communicate(timeout=60)
    assert "fedexp/cli/main.py" not in errors  # the traceback is torchrun's own
    return [line for line in errors.splitlines() if line.startswith("fedexp:")]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for ranks in /proc")
def test_stopped_killed_and_gone_on_with(tmp_path: Path) -> None:
    with torchrun(2, tmp_path / "ranks") as process:
        folder = wait_for_rows(tmp_path / "ranks", process)
        process.send_signal(signal.SIGTERM)
        (said,) = told(process)
    stopped = checkpointed(folder)
    assert f"stopped after round {stopped}; continue with: fedexp resume" in said

    with torchrun(3, tmp_path / "ranks", "--client-states", "disk") as process:
        wait_until(lambda: checkpointed(folder) >= stopped + 5, process)
        os.kill(rank_process(process.pid, 1), signal.SIGKILL)
        begun, said = told(process)
    assert begun.endswith(f"goes on after round {stopped}")
    assert "rank 1 ended without a word" in said
    assert "start the same command again" in said
    assert stopped + 5 <= checkpointed(folder) < ROUNDS

    assert main(["resume", str(folder), "--quiet"]) == 0
    assert main([*COMMAND, "--quiet", "--runs", str(tmp_path / "alone")]) == 0
    assert_same(folder, tmp_path / "alone" / folder.name)


def assert_same(folder: Path, other: Path) -> None:
    """Their rows and models agree; ranks leave nothing else behind."""
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
