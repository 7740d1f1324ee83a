"""One start of a `fedexp` command that is killed, has a full disk, or finds damaged files.

`Attempt` starts a command as forked processes, or under a real `torchrun`, and collects its output
and its exit statuses. `wait_for_moment` chooses when to kill it; `full_disk` and `damage` are the
other faults. Linux only: processes are found in /proc. The campaign is in `soak.py`.
"""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 300.0  # seconds after which an attempt counts as hanging, on a busy machine
GRACE = 30.0  # seconds for processes to end after the one that started them
FILES = ("spec.toml", "records.jsonl", "checkpoint.json", "model.safetensors", "result.json")


class Failure(Exception):
    """A case did not end as it must."""


class Reference(NamedTuple):
    """The outcome of an undisturbed command, its seconds and its number of rows."""

    outcome: dict[str, Any]
    seconds: float
    rows: int


@dataclass(frozen=True)
class Case:
    """One command and what happens to it."""

    number: int  # with the seed it decides all random choices
    scenario: str  # a key of `WEIGHTS`
    algorithm: str  # for which kills count; a comparison has two more
    command: tuple[str, ...]  # arguments that decide the numbers: those of the reference
    options: tuple[str, ...]  # arguments that do not affect the numbers
    ranks: int  # processes that share the work
    tolerance: float  # of numbers in the outcome; infinite where only trials are counted
    fault: str  # "disk", "damage" or ""
    spawn: bool  # start workers as users do, which imports torch again; otherwise fork them


class Attempt:
    """One start of a command in `folder`; `fault` is called in its processes before it."""

    def __init__(
        self, case: Case, folder: Path, extra: Sequence[str] = (), fault: Any = lambda: None
    ) -> None:
        self.case, self.folder, self.began = case, folder, time.monotonic()
        self.statuses: dict[int, int] = {}
        self._output, self._store = b"", 0
        self._chosen, self._killed = list[int](), list[str]()
        self._read, write = os.pipe()
        os.set_blocking(self._read, False)
        words = [*case.command, *case.options, *extra]
        if case.scenario == "torchrun":
            self.roots = [_torchrun(words, folder, write)]
        elif case.ranks == 1:
            self.roots = [fork(lambda: _fedexp(case, words, folder, {}, fault), write)]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            common |= {"WORLD_SIZE": str(case.ranks), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            self._store = fork(lambda: _serve(port), write)
            self.roots = []
            for rank in map(str, range(case.ranks)):
                own = {**common, "RANK": rank, "LOCAL_RANK": rank}
                self.roots += [fork(lambda: _fedexp(case, words, folder, own, fault), write)]  # noqa: B023
        os.close(write)

    def poll(self) -> bool:
        """Collect output and exit statuses; return whether the command is over."""
        with suppress(BlockingIOError):
            while data := os.read(self._read, 1 << 16):
                self._output += data
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self.statuses[found[0]] = os.waitstatus_to_exitcode(found[1])
        return all(pid in self.statuses for pid in self.roots)

    def kill(self, one: int | None) -> None:
        """Kill all processes of the command, or only the `one`-th."""
        chosen = [] if self.poll() else processes_under(self.roots)
        if one is not None and chosen:
            chosen = [chosen[one % len(chosen)]]
        self._killed = [describe(pid) for pid in chosen]
        signal_all(chosen, signal.SIGKILL)
        if chosen and self._store:  # torchrun asks the ranks that are left to end
            signal_all(set(self.roots) - set(chosen) - set(self.statuses), signal.SIGTERM)
        self._chosen = chosen

    def wait(self) -> str:
        """Wait for the end of all processes; return the output. Raise where one does not end."""
        deadline = self.began + LIMIT
        while left := processes_under([os.getpid()])[1:]:
            if self.poll() and self._store:
                signal_all([self._store], signal.SIGKILL)
            if self.poll() and deadline > time.monotonic() + GRACE:
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        remain = [describe(pid) for pid in left]
        signal_all(left, signal.SIGKILL)
        while not self.poll():
            time.sleep(0.005)
        os.close(self._read)
        output = self._output.decode(errors="replace")
        if left:
            what = f"do not end: {', '.join(remain)}; killed: {', '.join(self._killed) or 'none'}"
            raise Failure(f"{len(left)} processes {what}; output: {output}")
        return output

    @property
    def killed(self) -> bool:
        """Whether `kill` met a living process; workers that others wait for count as such."""
        return any(self.statuses.get(pid, -signal.SIGKILL) < 0 for pid in self._chosen)

    @property
    def status(self) -> int:
        """The exit status, of all ranks the one furthest from 0; negative for a signal."""
        return max((self.statuses[pid] for pid in self.roots), key=abs)


def fork(work: Callable[[], int], output: int) -> int:
    """Run `work` in a forked process with its own session, output to a pipe; return its id."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _fedexp(
    case: Case, words: list[str], folder: Path, variables: dict[str, str], fault: Any
) -> int:
    """Run a command of `fedexp` in this process; return its exit status."""
    from fedexp.cli.main import main

    os.chdir(folder)
    os.environ.update(variables)
    sys.argv = ["fedexp", *words]
    if not case.spawn:
        context: Any = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: context
    fault()
    return main(words)


def _serve(port: int) -> int:
    """Hold the store through which ranks find each other, as torchrun's agent does."""
    torch: Any = importlib.import_module("torch")
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()
    return int(store.port)


def _torchrun(words: list[str], folder: Path, output: int) -> int:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    streams: dict[str, Any] = {"stdout": output, "stderr": output, "start_new_session": True}
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    start += ["-m", "fedexp", *words]
    process = subprocess.Popen(start, cwd=folder, env=variables, **streams)
    process.returncode = 0  # its status is collected by `Attempt.poll`
    return process.pid


def processes_under(roots: Sequence[int]) -> list[int]:
    """Return the living processes among `roots` and their descendants, parents first.

    Without git, which looks up a commit, and the semaphore tracker of multiprocessing.
    """
    children: dict[int, list[int]] = {}
    hidden = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            children.setdefault(int(parent), []).append(int(folder.name))
            if state in "ZX" or name == "git" or b"_tracker" in (folder / "cmdline").read_bytes():
                hidden.add(int(folder.name))
    found = list(roots)
    for pid in found:  # grows while it is read
        found += children.get(pid, [])
    return [pid for pid in found if pid not in hidden and Path(f"/proc/{pid}").exists()]


def describe(pid: int) -> str:
    """Return what a process is, and the function of the kernel in which it waits.

    Distinguishes a hanging torchrun, whose agent has no rank, from hanging ranks.
    """
    with suppress(OSError):
        process = Path(f"/proc/{pid}")
        variables = (process / "environ").read_bytes().decode(errors="replace").split("\0")
        rank = next((each for each in variables if each.startswith("RANK=")), None)
        command = (process / "cmdline").read_bytes().decode(errors="replace")
        name = rank or ("agent" if "torch.distributed.run" in command else "process")
        return f"{name} in {(process / 'wchan').read_text()}"
    return "ended"


def signal_all(processes: Any, number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def full_disk(rng: random.Random) -> Callable[[], None]:
    """Return what makes the disk full for a process, at a size of files or a call of fsync."""
    by_size, size = rng.random() < 0.6, int(10 ** rng.uniform(1, 5.3))
    fsync, calls = os.fsync, iter(range(rng.randrange(60)))

    def full(handle: int) -> None:
        if next(calls, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    def fault() -> None:
        if by_size:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail with EFBIG
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        else:
            setattr(os, "fsync", full)  # noqa: B010

    return fault


def damage(folder: Path, rng: random.Random) -> tuple[Path, str] | None:
    """Truncate a random file or flip one of its bits; return the file and what was done.

    Runs that are over are spared: the command does not read most of their files again.
    """
    over = {path.parent for path in folder.rglob("result.json")}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.parent not in over)
    if not (files := [path for path in files if path.stat().st_size]):
        return None
    path = rng.choice(files)
    data = bytearray(path.read_bytes())
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    if rng.random() < 0.4:
        path.write_bytes(data[:place])
        return path, f"truncated from {len(data)} to {place} bytes"
    data[place] ^= 1 << bit
    path.write_bytes(data)
    return path, f"bit {bit} of byte {place} flipped"


def wait_for_moment(attempt: Attempt, rng: random.Random, reference: Reference) -> None:
    """Return at a random moment in what is left of the command, or at its end."""
    folder, (_, seconds, rows) = attempt.folder, reference
    have, before = count_rows(folder), stamps(folder)
    kind = rng.choice(["start", "time", "row", "row", "file"])
    wanted = rng.randint(have, max(have, rows))
    name = rng.choice(FILES)
    left = {
        "start": 0.2 * seconds,
        "time": seconds * max(1 - have / max(rows, 1), 0.2),
        "row": 2 * seconds / max(rows, 1),
        "file": 0.003,
    }
    pause = rng.uniform(0, left[kind])

    def is_near() -> bool:
        if kind == "file":  # or the temporary file that becomes it
            return any(name in Path(path).name for path, _ in stamps(folder) - before)
        return kind != "row" or count_rows(folder) >= wanted

    while not attempt.poll() and not is_near() and time.monotonic() < attempt.began + LIMIT:
        time.sleep(0.001)
    end = time.monotonic() + pause
    while not attempt.poll() and (rest := end - time.monotonic()) > 0:
        time.sleep(min(rest, 0.005))


def stamps(folder: Path) -> set[tuple[str, int]]:
    """Return all files under a folder, which may change meanwhile, with their times."""
    found = set()
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found.add((f"{path}/{name}", os.stat(f"{path}/{name}").st_mtime_ns))
    return found


def count_rows(folder: Path) -> int:
    """Return how many lines the records under a folder have."""
    paths = [Path(path) for path, _ in stamps(folder) if path.endswith("/records.jsonl")]
    with suppress(OSError):  # it was removed just now
        return sum(path.read_bytes().count(b"\n") for path in paths)
    return 0
