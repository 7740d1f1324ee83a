"""Processes that end with the program that started them, and so does all that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

GRACE_SECONDS = 5.0
SETTINGS = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Processes:
    """Flower's commands as processes, each with a log and a home of its own under `folder`.

    Args:
        folder: `NAME.log` is what the process prints, `NAME` its FLWR_HOME.
        threads: threads of each process, since several share this machine.
    """

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.folder, self.threads = folder.resolve(), threads
        self.started: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(
        self, name: str, command: list[str], fresh_log: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start one of Flower's commands."""
        with (self.folder / f"{name}.log").open("wb" if fresh_log else "ab") as log:
            process = subprocess.Popen(
                [program(command[0]), *command[1:]],
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the program only, which stops them
            )
        self.started.append(process)
        return process

    def environment(self, name: str) -> dict[str, str]:
        """Each process has its own FLWR_HOME, by which its descendants are known."""
        beside = Path(sys.executable).parent  # where SuperExec finds Flower's other commands
        return {
            **os.environ,
            **SETTINGS,
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": str(self.threads),
            "FLWR_HOME": str(self.folder / name),
        }

    def log(self, name: str) -> str:
        """What a process has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def kill(self, name: str | None = None) -> None:
        """End a process and all it started at once, as a loss of power would; or all of ours."""
        while left := list(self.family(name)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask all processes to end, and make sure of it."""
        for process in self.started:
            process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        self.kill()
        for process in self.started:
            process.kill()
            process.wait()
        self.started = []

    def family(self, name: str | None = None) -> Iterator[int]:
        """The processes started as `name`, or all of ours, with those that they started.

        SuperExec and its apps leave their parent's session, so they are found by what they
        inherit. Where there is no /proc they end by themselves a little after their parent.
        """
        homes = f"FLWR_HOME={self.folder}{os.sep}{name or ''}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                entries = path.read_bytes().split(b"\0")
                if homes in entries or (name is None and any(e.startswith(homes) for e in entries)):
                    yield int(path.parent.name)

    def _reap(self) -> None:
        """Let go of those that have died: as zombies they would seem alive to their children."""
        self.started = [process for process in self.started if process.poll() is None]


def program(name: str) -> str:
    """Flower's commands are installed beside the interpreter that has it installed."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name
