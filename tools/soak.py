"""Kill, starve and damage runs at random; each must end with the numbers of an undisturbed one.

    make soak
    python tools/soak.py --kills 40 --seed 7 --only run,tune
    python tools/soak.py --seed 7 --case 12          # repeat one case

A case is one `fedexp` command in an empty folder: `run`, `compare` with worker processes, `tune`
(grid, eps rule, free search), one of these on two ranks, or under a real `torchrun`; algorithms
take turns. The command is started and killed with SIGKILL several times, at random moments: soon
after the start, uniformly over what is left, at a random row of the records, right after a file
appears. Mostly all of its processes are killed, sometimes one worker or one rank. In some cases:

disk    One attempt has a full disk: files cannot grow beyond a random size, or `fsync` fails with
        ENOSPC from a random call on. It ends with one line of error, or did not need the space.
damage  After the kills, one file of an unfinished run, or the study, is truncated or one of its
        bits is flipped. The command succeeds, or refuses in one line that names a remedy.

The command then runs to its end, and is compared with the same command undisturbed: rows of
`records.jsonl` and `result.json` without times, `model.safetensors` and the last checkpoint's
tensors to the bit, options in `spec.toml`, the JSON on stdout (of `tune`: the score of every
trial), and the names of all files. Not compared: `environment.json` (machine and times),
`fingerprint.json`, comments, pictures. `compare` and `tune` on ranks share the clients of the last
run where they have one whole run each otherwise, so what is left after a kill is equal up to
rounding only. A free search draws new points after a kill, so only its number of trials is
compared. No process, lock or temporary file may remain.

Attempts are forks of this process, which has imported what the commands need and started no
thread. Linux only. A campaign appends one line to benchmarks/records/soak.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import importlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "soak.jsonl"
LIMIT = 300.0  # seconds after which an attempt counts as hanging, on a busy machine
GRACE = 30.0  # seconds for processes to end after the one that started them
WEIGHTS = {"run": 8, "compare": 4, "tune": 4, "ranks": 4, "torchrun": 0.3}
SMALL = ["--cohort", "5", "--set", "task.clients=12", "--set", "task.rows=4"]
TASKS = [
    ["toy", "--rounds", "40"],
    ["synthetic", "--rounds", "40", *SMALL, "--set", "task.dim=400"],
    ["digits-mlp", "--rounds", "8", "--cohort", "5", "--set", "local.steps=4"],
]
FILES = ("spec.toml", "records.jsonl", "checkpoint.json", "model.safetensors", "result.json")
REMOVE = ("remove ", "choose another", "start another run", "delete it")  # beside --restart
COUNTS = ("cases", "starts", "kills", "disk errors", "damaged", "refused", "failures")


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


def draw_case(number: int, seed: int, algorithms: Sequence[str], only: Sequence[str]) -> Case:
    """Return the case of a number."""
    rng = random.Random(f"{seed} {number}")
    scenario = rng.choices(only, [WEIGHTS[name] for name in only])[0]
    ranks = 2 if scenario in ("ranks", "torchrun") else 1
    kind = rng.choice(["run", "run", "compare", "tune"]) if ranks > 1 else scenario
    faults = ["", "damage"] if scenario == "torchrun" else ["", "", "disk", "damage", "damage"]
    fault, task = rng.choice(faults), rng.choice(TASKS)
    turn = [algorithms[(number + k) % len(algorithms)] for k in (0, 1, 5)]
    every = ("--checkpoint-every", rng.choice(["0", "0", "0.02"]))
    jobs = ("--jobs", rng.choice(["1", "2", "2"])) if ranks == 1 else ()
    options, tolerance = (*every, *jobs), 0.0 if ranks == 1 or kind == "run" else 0.01
    if kind == "run":
        command = ["run", *task, "--algorithm", turn[0], "--out", "run"]
        where = rng.choice(["disk", "memory"]) if "scaffold" in turn[0] else "auto"
        options = (*every, "--client-states", where)
    elif kind == "compare":
        command = ["compare", *task, "--algorithms", ",".join(turn), "--runs", "runs"]
    else:
        search = rng.choice([["--grid", "local.lr=0.001,0.01,0.1"], ["--epsilon"], ["--protocol"]])
        if search == ["--epsilon"] and "exp" not in turn[0]:
            search = ["--grid", "local.lr=0.01,0.1"]
        if search == ["--protocol"]:
            search, tolerance = ["--protocol", "free", "--trials", "4"], math.inf
        short = [*task, "--rounds", "4"]
        command = ["tune", *short, "--algorithm", turn[0], *search, "--study", "study.db"]
        options = jobs
    whole = (*command, "--json", "--quiet")
    spawn = rng.random() < 0.1
    return Case(number, scenario, turn[0], whole, options, ranks, tolerance, fault, spawn)


class Attempt:
    """One start of a command in `folder`; `fault` is called in its processes before it."""

    def __init__(
        self, case: Case, folder: Path, extra: Sequence[str] = (), fault: Any = lambda: None
    ) -> None:
        self.case, self.folder, self.began = case, folder, time.monotonic()
        self.statuses: dict[int, int] = {}
        self._output, self._store, self._chosen = b"", 0, list[int]()
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
        signal_all(left, signal.SIGKILL)
        while not self.poll():
            time.sleep(0.005)
        os.close(self._read)
        output = self._output.decode(errors="replace")
        if left:
            raise Failure(f"{len(left)} processes do not end; output: {output}")
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
    kind = rng.choice(
        ["start", "time", "row", "row", "file"] if rows else ["start", "time", "file"]
    )
    wanted = rng.randint(have, max(have, rows))
    name = rng.choice(FILES) if rows else "study.db-journal"
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


def outcome(case: Case, folder: Path, output: str) -> dict[str, Any]:
    """Return all that must not depend on what happened to a command before its end."""
    printed = untimed(json.loads([line for line in output.splitlines() if line[:1] == "{"][-1]))
    if case.tolerance == math.inf:
        return {"trials": len(printed["algorithms"][0]["trials"])}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    found: dict[str, Any] = {"files": names, "printed": printed}
    for run in sorted(path.parent for path in folder.rglob("spec.toml")):
        state = json.loads((run / "checkpoint.json").read_bytes())["model"]["file"]
        found[run.name] = {
            "spec": tomllib.loads((run / "spec.toml").read_text()),
            "result": untimed(json.loads((run / "result.json").read_bytes())),
            "rows": [untimed(json.loads(line)) for line in (run / "records.jsonl").open()],
            "model": _tensors(run / "model.safetensors", case.tolerance == 0),
            "state": _tensors(run / state, case.tolerance == 0),
        }
    return found


def _tensors(path: Path, exact: bool) -> bytes | dict[str, list[float]]:
    """Return the bytes of a file of tensors, or their values."""
    load: Any = importlib.import_module("safetensors.torch").load
    data = path.read_bytes()
    return data if exact else {name: x.flatten().tolist() for name, x in load(data).items()}


def untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: untimed(each) for name, each in value.items() if "seconds" not in name}
    return [untimed(each) for each in value] if isinstance(value, list) else value


def check_outcome(found: Any, wanted: Any, tolerance: float, where: str = "") -> None:
    """Raise at the first difference between two outcomes."""
    equal = found == wanted
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        for name in found:
            check_outcome(found[name], wanted[name], tolerance, f"{where}/{name}")
        return
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for place, each in enumerate(found):
            check_outcome(each, wanted[place], tolerance, f"{where}[{place}]")
        return
    if isinstance(found, list) and isinstance(wanted, list):
        alone = [x for x in found if x not in wanted], [x for x in wanted if x not in found]
        found, wanted = alone
    elif tolerance and isinstance(found, float) and isinstance(wanted, float):
        equal = math.isclose(found, wanted, rel_tol=tolerance, abs_tol=tolerance)
    if not equal:
        raise Failure(f"{where} has {str(found)[:600]}, undisturbed {str(wanted)[:600]}")


# Python's own report of a spawned process whose parent was killed before it sent any work.
ORPHANED = re.compile(
    r'Traceback \(most recent call last\):\n  File "<string>", line 1, in <module>\n'
    r"(?:(?!fedexp).)*?\n(?:EOFError|BrokenPipeError|ConnectionResetError)[^\n]*\n?",
    re.DOTALL,
)


def check_output(case: Case, status: int, output: str) -> None:
    """Raise for a traceback, for several lines of error, and for a refusal without a line."""
    output = ORPHANED.sub("", output)
    errors = [line for line in output.splitlines() if line.startswith("fedexp: error:")]
    if "Traceback" in output and (case.scenario != "torchrun" or "fedexp/cli/" in output):
        raise Failure(f"a traceback: {output}")
    if len(errors) > 1 or (status > 0 and not errors):
        raise Failure(f"status {status} with {len(errors)} lines of error: {output}")


class Soak:
    """A campaign: its references and its counts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.counts = {name: Counter[str]() for name in WEIGHTS}
        self.kills: Counter[str] = Counter()  # of each algorithm
        self._references: dict[Any, Reference] = {}

    def run(self, case: Case) -> None:
        """Run a case; count what happens; raise `Failure` where it does not end as it must."""
        rng = random.Random(f"{self.seed} {case.number} moments")
        count, folder = self.counts[case.scenario], self.folder / f"case-{case.number}"
        count["cases"] += 1
        reference = self._reference(case)
        folder.mkdir()
        kills = rng.randint(1, 3 if case.fault or case.scenario == "torchrun" else 9)
        for _ in range(kills):
            if not self._killed(Attempt(case, folder), rng, reference):
                break
        if case.fault == "disk":
            attempt = Attempt(case, folder, fault=full_disk(rng))
            output = attempt.wait()
            check_output(case, attempt.status, output)
            count["disk errors"] += attempt.status != 0
        harm = damage(folder, rng) if case.fault == "damage" else None
        count["damaged"] += harm is not None
        try:
            output = self._finished(case, folder, rng, reference, harm and harm[0])
            found = outcome(case, folder, output)
            check_outcome(found, reference.outcome, case.tolerance)
        except Exception as error:
            error.add_note(f"damaged: {harm}")
            raise
        for path in folder.rglob("*.lock"):
            with path.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)

    def _reference(self, case: Case) -> Reference:
        key = case.command, case.ranks
        if key not in self._references:
            folder = self.folder / "reference"
            folder.mkdir()
            attempt = Attempt(replace(case, options=()), folder)
            output = attempt.wait()
            if attempt.status:
                raise Failure(f"undisturbed it ends with {attempt.status}: {output}")
            seconds, rows = time.monotonic() - attempt.began, count_rows(folder)
            self._references[key] = Reference(outcome(case, folder, output), seconds, rows)
            shutil.rmtree(folder)
        return self._references[key]

    def _killed(self, attempt: Attempt, rng: random.Random, reference: Reference) -> bool:
        """Kill an attempt at a random moment; return False where it succeeded before."""
        case, one = attempt.case, rng.randrange(100) if rng.random() < 0.25 else None
        wait_for_moment(attempt, rng, reference)
        attempt.kill(one)
        output, killed = attempt.wait(), attempt.killed
        check_output(case, 0 if killed else attempt.status, output)
        if attempt.status and not killed:
            raise Failure(f"ends with {attempt.status} after kills: {output}")
        self.counts[case.scenario]["starts"] += 1
        self.counts[case.scenario]["kills"] += killed
        self.kills[case.algorithm] += killed
        return killed

    def _finished(
        self,
        case: Case,
        folder: Path,
        rng: random.Random,
        reference: Reference,
        harmed: Path | None,
    ) -> str:
        """Run the command to its end, with the remedy that it names; return its output."""
        extra: list[str] = []
        for _ in range(3):
            self.counts[case.scenario]["starts"] += 1
            attempt = Attempt(case, folder, extra)
            output = attempt.wait()
            check_output(case, attempt.status, output)
            if attempt.status == 0:
                return output
            if harmed is None or extra:
                raise Failure(f"{' '.join(extra)} ends with {attempt.status}: {output}")
            self.counts[case.scenario]["refused"] += 1
            if "--restart" in output:
                extra = ["--restart"]
                if rng.random() < 0.5:  # killed while it discards the old run: with or without it
                    self._killed(Attempt(case, folder, extra), rng, reference)
                    extra = rng.choice([extra, []])
            elif not any(words in output for words in REMOVE):
                raise Failure(f"refused without a remedy: {output}")
            elif (harmed.parent / "spec.toml").exists():
                shutil.rmtree(harmed.parent)
            else:
                harmed.unlink()
        raise Failure(f"refused again and again: {output}")

    def write_record(self, path: Path, seconds: float) -> None:
        """Append a line about the campaign; print the sums of all lines."""
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
        total = sum(self.counts.values(), Counter[str]())
        line = {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": subprocess.run(describe, capture_output=True, text=True).stdout.strip(),
            "seed": self.seed,
            **{name.replace(" ", "_"): total[name] for name in COUNTS},
            "seconds": round(seconds),
            "scenarios": {name: dict(count) for name, count in self.counts.items() if count},
            "kills_by_algorithm": dict(sorted(self.kills.items())),
            "python": platform.python_version(),
            "torch": importlib.import_module("torch").__version__,
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        lines = [json.loads(each) for each in path.read_text().splitlines()]
        kills, failures = (sum(each[name] for each in lines) for name in ("kills", "failures"))
        print(f"{path}: {kills} kills, {failures} failures in {len(lines)} campaigns")


def preload(folder: Path) -> list[str]:
    """Import what the commands import, as a fork finds out; return the names of all algorithms."""

    def explore() -> int:
        from fedexp.cli.main import main

        os.chdir(folder)
        free = ["--protocol", "free", "--trials", "2", "--jobs", "1"]
        failed = main(["run", *TASKS[2], "--algorithm", "scaffold"])
        failed += main(["compare", *TASKS[1], "--jobs", "1"]) + main(["tune", *TASKS[0], *free])
        Path("modules").write_text("\n".join(sys.modules))
        os.dup2(os.open("algorithms", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        return failed + main(["algorithms"])

    folder.mkdir()
    read, write = os.pipe()
    pid = fork(explore, write)
    os.close(write)
    with open(read) as pipe:
        output = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"soak: the commands fail undisturbed: {output}")
    for name in (folder / "modules").read_text().split():
        with suppress(ImportError):
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("soak: an import has started threads, so this process cannot be forked")
    lines = (folder / "algorithms").read_text().splitlines()
    shutil.rmtree(folder)
    return [line.split()[0] for line in lines if line[0] != " " and line.split()[0] != "any"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000, metavar="N", help="stop after N (1000)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after as many")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="(the time)")
    parser.add_argument("--only", default=",".join(WEIGHTS), metavar="A,B", help="(%(default)s)")
    parser.add_argument("--case", type=int, metavar="I", help="run this case only; no record")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="PATH")
    args = parser.parse_args()
    only = [name for name in args.only.split(",") if name in WEIGHTS]
    if ",".join(only) != args.only:
        parser.error(f"--only takes {', '.join(WEIGHTS)}")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: children end too
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where fsync costs nothing
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=os.environ.get("TMPDIR") or memory))
    soak, failures = Soak(folder, args.seed), 0
    algorithms, began = preload(folder / "preload"), time.monotonic()
    only_case = [] if args.case is None else [args.case]
    for number in only_case or itertools.count():
        case = draw_case(number, args.seed, algorithms, only)
        try:
            soak.run(case)
        except Exception as error:
            what = "".join(traceback.format_exception(error)[-2:])
            failures += 1
            soak.counts[case.scenario]["failures"] += 1
            shutil.rmtree(folder / "reference", ignore_errors=True)
            words = " ".join((*case.command, *case.options))
            print(f"\nFAILED case {number}, {case.ranks} ranks: fedexp {words}\n  {what}")
            again = f"--seed {args.seed} --only {args.only} --case {number}"
            print(f"  folder {folder}/case-{number}; repeat with: python tools/soak.py {again}")
        finally:
            signal_all(processes_under([os.getpid()])[1:], signal.SIGKILL)
        kills, seconds = soak.kills.total(), time.monotonic() - began
        if sys.stdout.isatty() or number % 10 == 0:
            line = f"soak: {number + 1} cases, {kills} kills, {failures} failures, {seconds:.0f} s"
            print(line, end="\r" if sys.stdout.isatty() else "\n", flush=True)
        if kills >= args.kills or failures >= 10 or seconds > args.seconds:
            break
    print("\n" + " " * 10 + "".join(f"{name:>13}" for name in COUNTS))
    for name in only:
        print(f"{name:10}" + "".join(f"{soak.counts[name][each]:13}" for each in COUNTS))
    if not only_case:
        soak.write_record(args.record, seconds)
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
