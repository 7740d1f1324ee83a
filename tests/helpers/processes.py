"""Subprocesses for tests: they and their children end with the test, which never hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

LONGEST = 300.0  # seconds, for all processes of a test
MARK = "FEDEXP_TEST_JOB"


@contextmanager
def started(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process; at the end of the block, kill it and its descendants.

    torchrun starts ranks in sessions of their own, so descendants are found by an environment
    variable that they inherit.
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
        while _kill_marked(f"{MARK}={mark}"):
            pass
        process.communicate()


def finished(command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a process until it ends by itself, and return its output and exit status."""
    with started(command, cwd) as process:
        stdout, stderr = process.communicate(timeout=LONGEST)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _kill_marked(mark: str) -> bool:
    """Kill the processes with a mark in their environment; return whether there were any."""
    found = False
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in environ.read_text(errors="replace").split("\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
                found = True
    return found
