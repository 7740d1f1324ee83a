"""Processes for tests, none of which outlives its block: a test may fail, but must not hang."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST = 300.0  # seconds, for all ranks of a test
MARK = "FEDEXP_TEST_JOB"


@contextmanager
def started(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process, and whatever it starts, until the end of the block.

    torchrun gives every rank a session of its own, so they are told by a mark they inherit.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {}), MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        while _killed(f"{MARK}={mark}"):
            pass
        process.communicate()


def finished(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What a process has said when it has ended by itself, with what it started."""
    with started(command, cwd) as process:
        stdout, stderr = process.communicate(timeout=LONGEST)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _killed(mark: str) -> bool:
    """Kill the processes with a mark in their environment; whether there were any."""
    found = False
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in environ.read_text(errors="replace").split("\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
                found = True
    return found
