"""Seconds of `fedexp compare` of n algorithms x m seeds, against n x m times one `fedexp run`.

Both are processes started on the command line, import and start-up included, on generated data: the
digits MLP (4 algorithms x 5 seeds x 60 rounds) and the EMNIST CNN (4 algorithms x 5 seeds x 200
rounds, evaluated every 5). The comparison and one run of each algorithm take turns; the other side
is the sum of these runs times the number of seeds. Prints a table with the range and, with --out,
writes it as JSON.

    python benchmarks/comparison.py --device cuda --precision bf16 --works EMNIST
    python benchmarks/comparison.py --tiny                            # a dry run
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fedexp.analysis.tables import text_table
from machine import Row, Timing, hardware, ratio, write_record

TASKS = Path(__file__).with_name("startup_tasks.py")
LONGEST = 3600  # seconds
ALGORITHMS = ("fedavg", "fedexp", "scaffold", "fedadagrad")


@dataclass(frozen=True)
class Study:
    """A comparison.

    Attributes:
        task: function of `startup_tasks.py`.
        rounds: of each run.
        every: rounds between evaluations.
        cohort: clients per round; None for the task's own.
    """

    task: str
    rounds: int
    every: int
    cohort: int | None = None


STUDIES = {"digits MLP": Study("mlp", 60, 5), "EMNIST CNN": Study("emnist", 200, 5)}
TINY = {"digits MLP": Study("mlp", 2, 1, cohort=2)}


@dataclass(frozen=True)
class Commands:
    """The command lines of a study."""

    study: Study
    algorithms: tuple[str, ...]
    seeds: int
    device: str
    precision: str | None

    def compare(self, folder: str) -> list[str]:
        """Return the command that compares all algorithms over all seeds."""
        names = ["--algorithms", ",".join(self.algorithms), "--seeds", str(self.seeds)]
        return self._command("compare", [*names, "--out", f"{folder}/figure.png"])

    def run(self, algorithm: str) -> list[str]:
        """Return the command that trains one algorithm with one seed."""
        return self._command("run", ["--algorithm", algorithm])

    def _command(self, verb: str, more: list[str]) -> list[str]:
        study = self.study
        command = [sys.executable, "-m", "fedexp", verb, f"{TASKS}:{study.task}", "--quiet"]
        command += ["--no-save", "--device", self.device, "--rounds", str(study.rounds)]
        command += ["--evaluate-every", str(study.every), *more]
        command += ["--precision", self.precision] if self.precision else []
        return command + (["--cohort", str(study.cohort)] if study.cohort else [])


def milliseconds(command: list[str]) -> float:
    """Return the time of a command; raises with its last line where it fails."""
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONGEST, env=dict(os.environ)
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["failed"])[-1]
        raise RuntimeError(f"{' '.join(command)}: {last}")
    return 1e3 * (time.perf_counter() - began)


def measure(name: str, commands: Commands, turns: int) -> Row:
    """Return the row of a study; in each turn the comparison, then one run of each algorithm."""
    together, separate = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            together.append(milliseconds(commands.compare(folder)))
            alone = [milliseconds(commands.run(algorithm)) for algorithm in commands.algorithms]
            separate.append(commands.seeds * sum(alone))
    ours, other = Timing(tuple(together)), Timing(tuple(separate))
    times, runs = ratio(other, ours), len(commands.algorithms) * commands.seeds
    study = commands.study
    return {
        "work": f"fedexp compare, {name}, {runs} runs of {study.rounds} rounds",
        "algorithms": list(commands.algorithms),
        "seeds": commands.seeds,
        "runs": runs,
        "rounds": study.rounds,
        "evaluate_every": study.every,
        "precision": commands.precision,
        **ours.row(),
        "separate_ms": round(other.median, 3),
        "separate_ms_min": round(min(other.turns), 3),
        "separate_ms_max": round(max(other.turns), 3),
        "times": round(times.median, 2),
        "times_min": round(min(times.turns), 2),
        "times_max": round(max(times.turns), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--works", nargs="*", default=[""], help="parts of names, e.g. EMNIST")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="the device's own by default")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="60 for digits, 200 for EMNIST")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="two rounds of digits, for a dry run")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    where, rows = hardware(args.device), []
    for name, study in (TINY if args.tiny else STUDIES).items():
        if any(wanted in name for wanted in args.works):
            rounds = args.rounds or study.rounds
            chosen = Study(study.task, rounds, study.every, study.cohort)
            algorithms = tuple(args.algorithms.split(","))
            commands = Commands(chosen, algorithms, args.seeds, args.device, args.precision)
            rows.append(measure(name, commands, args.turns))
            print(rows[-1], file=sys.stderr, flush=True)
    head = ["work", "s (min-max)", "separate runs, s (min-max)", "times (min-max)", "turns"]
    print(where)
    print(text_table(head, [_cells(row) for row in rows]))
    write_record(args.out, where, rows)


def _cells(row: Row) -> list[str]:
    def spread(name: str, unit: float) -> str:
        middle, low, high = (row[key] / unit for key in (name, f"{name}_min", f"{name}_max"))
        return f"{middle:.3g} ({low:.3g}-{high:.3g})"

    seconds = [spread("ms", 1e3), spread("separate_ms", 1e3), spread("times", 1.0)]
    return [row["work"], *seconds, str(row["turns"])]


if __name__ == "__main__":
    main()
