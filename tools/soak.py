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
damage  After the kills, one file of an unfinished run is truncated or one of its bits is flipped.
        The command succeeds, or refuses in one line that names a remedy.

The command then runs to its end, and is compared with the same command undisturbed: rows of
`records.jsonl` and `result.json` without times, `model.safetensors` and the last checkpoint's
tensors to the bit, options in `spec.toml`, the JSON on stdout (of `tune`: the score of every
trial), and the names of all files. Not compared: `environment.json` (machine and times),
`fingerprint.json`, comments, pictures. `compare` and `tune` on ranks share the clients of the last
run where they have one whole run each otherwise, so what is left after a kill is equal up to
rounding only. A free search draws new points after a kill, so only its number of trials is
compared. No process, lock or temporary file may remain.

Attempts (`soak_attempt.py`) are forks of this process, which has imported what the commands need
and started no thread. Linux only. A campaign appends one line to benchmarks/records/soak.jsonl.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tools.soak_attempt import (  # noqa: E402
    Attempt,
    Case,
    Failure,
    Reference,
    count_rows,
    damage,
    fork,
    full_disk,
    processes_under,
    signal_all,
    wait_for_moment,
)

RECORD = ROOT / "benchmarks" / "records" / "soak.jsonl"
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
WEIGHTS = {"run": 8, "compare": 4, "tune": 4, "ranks": 4, "torchrun": 0.3}
SMALL = ["--cohort", "5", "--set", "task.clients=12", "--set", "task.rows=4"]
TASKS = [
    ["toy", "--rounds", "40"],
    ["synthetic", "--rounds", "40", *SMALL, "--set", "task.dim=400"],
    ["digits-mlp", "--rounds", "8", "--cohort", "5", "--set", "local.steps=4"],
]
REMOVE = ("remove ", "choose another", "start another run", "delete it")  # beside --restart
COUNTS = ("cases", "starts", "kills", "disk errors", "damaged", "refused", "failures")


def draw_case(number: int, seed: int, algorithms: Sequence[str], only: Sequence[str]) -> Case:
    """Return the case of a number."""
    rng = random.Random(f"{seed} {number}")
    (scenario,) = rng.choices(only, [WEIGHTS[name] for name in only])
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
        command = ["tune", *short, "--algorithm", turn[0], *search, "--runs", "runs"]
        options = jobs
    whole = (*command, "--json", "--quiet")
    spawn = rng.random() < 0.1
    return Case(number, scenario, turn[0], whole, options, ranks, tolerance, fault, spawn)


def outcome(case: Case, folder: Path, output: str) -> dict[str, Any]:
    """Return all that must not depend on what happened to a command before its end."""
    printed = untimed(json.loads([line for line in output.splitlines() if line[:1] == "{"][-1]))
    if case.tolerance == math.inf:
        return {"trials": len(printed["algorithms"][0]["trials"])}
    if "--epsilon" in case.command:  # several jobs start trials that the rule may not need
        return {"printed": printed}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    found: dict[str, Any] = {"files": names, "printed": printed}
    for run in sorted(path.parent for path in folder.rglob("spec.toml")):
        checkpoint, tensors = run / "checkpoint.json", list[str]()
        if checkpoint.exists():  # trials store no tensors
            state = json.loads(checkpoint.read_bytes())["model"]["file"]
            tensors = ["model.safetensors", state]
        found[run.name] = {
            "spec": tomllib.loads((run / "spec.toml").read_text()),
            "result": untimed(json.loads((run / "result.json").read_bytes())),
            "rows": [untimed(json.loads(line)) for line in (run / "records.jsonl").open()],
            "tensors": [_tensors(run / name, case.tolerance == 0) for name in tensors],
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
        for refused in range(3):
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
                # once killed while it discards the old run, and then with the option or without
                if refused == 0 and rng.random() < 0.5:
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
    os.environ |= dict.fromkeys(THREADS, "1")
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
