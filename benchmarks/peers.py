"""FedAvg side by side on a CPU, or on a GPU with --device cuda.

Three pieces of work, uniform weights, no evaluation, median of warm rounds:

- W1: MLP 64-64-10, 100 clients x 100 examples, 20 per round, 20 steps of batches of 50.
- W2: pfl-research's published benchmark: 1,000 clients x 50 images 3x32x32, 50 per round, one epoch
  of batches of 10, its CNN of two convolutions (`pfl_cnn` in `peers_work.py`).
- W3, on a GPU: the paper's ResNet-18, 100 clients x 500 images, 20 per round, 20 steps of batches
  of 50; images are not augmented.

Every contestant runs alone in a separate process, once with one thread and once with all cores, and
pfl also as one process per core. All have a turn, then all again: the best configuration counts, by
its median over turns, with its range. This package is listed by the engine that ran: what "auto"
takes, and the loop; turns of the same engine in the same configuration are one row. A peer that is
not installed is skipped. Peers have many dependencies, so give each a virtual environment:

    python benchmarks/peers.py --pfl ENV/bin/python --flower ENV/bin/python --fluke ENV/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedexp.analysis.tables import text_table
from machine import Row, Timing, cores, hardware, write_record

HERE = Path(__file__).parent
CORES = cores()
ROUNDS = {"W1": (3, 20), "W2": (1, 3), "W3": (2, 3)}  # to warm up, and counted
USUAL = {"cpu": ("W1", "W2"), "cuda": ("W1", "W2", "W3")}
TURNS = 5
LIMIT = 900  # seconds for one configuration
THREADS = tuple(sorted({1, CORES}))
OURS = "fedexp"
Configuration = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Contestant:
    """A package that trains, or an engine of this one.

    Attributes:
        name: its name in the table; this package's is followed by the engine that ran.
        script: its script, without the suffix.
        engine: argument of the script: the engine to use and, after a slash, the precision.
        works: the work it does.
        module: the module that must be importable.
        install: the command that installs it.
        configurations: the launcher before the script, and numbers of threads, by name.
        devices: where it can be compared.
    """

    name: str
    script: str
    engine: str = ""
    works: tuple[str, ...] = ("W1", "W2", "W3")
    module: str = "torch"
    install: str = "pip install -e ."
    configurations: dict[str, Configuration] = field(
        default_factory=lambda: {"1 process": ((), THREADS)}
    )
    devices: tuple[str, ...] = ("cpu", "cuda")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}")
CONTESTANTS = [
    Contestant(OURS, "peers_ours", "auto"),
    Contestant(OURS, "peers_ours", "auto/bf16", devices=("cuda",)),
    Contestant(OURS, "peers_ours", "loop"),
    Contestant("sequential PyTorch", "peers_sequential"),
    Contestant(
        "pfl",
        "peers_pfl",
        module="pfl",
        install="pip install 'pfl[pytorch]==0.6.0'",
        configurations={"1 process": ((), THREADS), f"torchrun x {CORES}": (TORCHRUN, (1,))},
    ),
    Contestant(
        "fluke",
        "peers_fluke",
        "",
        ("W1",),
        "fluke",
        "pip install fluke-fl==0.8.1",
        devices=("cpu",),
    ),
    Contestant(
        "Flower simulation",
        "peers_flower",
        "",
        ("W1",),
        "flwr",
        "pip install 'flwr[simulation]==1.41.0'",
        {f"{CORES} actors": ((), (1,))},
        ("cpu",),
    ),
]


@dataclass(frozen=True)
class Entry:
    """One configuration of a contestant on one piece of work."""

    contestant: Contestant
    python: str
    work: str
    processes: str
    launcher: tuple[str, ...]
    threads: int
    device: str


def entries(python_of: dict[str, str], works: Sequence[str], device: str) -> Iterator[Entry]:
    """Yield all that can run here; on a GPU in one process, whose threads hardly matter."""
    for contestant in [each for each in CONTESTANTS if device in each.devices]:
        python = python_of.get(contestant.module, sys.executable)
        if not has(python, contestant.module):
            print(f"{contestant.name}: skipped; {contestant.install}", file=sys.stderr)
            continue
        for work in [name for name in contestant.works if name in works]:
            single = {"1 process": ((), (CORES,))}
            configurations = contestant.configurations if device == "cpu" else single
            for processes, (launcher, numbers) in configurations.items():
                for threads in numbers:
                    yield Entry(contestant, python, work, processes, launcher, threads, device)


def measure(chosen: Sequence[Entry], turns: int, quick: bool) -> list[Row]:
    """Return one row per contestant, engine, work and configuration, with all of its turns."""
    rows: list[Row] = [
        {
            "contestant": entry.contestant.name,
            "requested": entry.contestant.engine,
            "work": entry.work,
            "processes": entry.processes,
            "threads": entry.threads,
            "turns": [],
        }
        for entry in chosen
    ]
    for turn in range(turns):
        for entry, row in zip(chosen, rows, strict=True):
            if "error" not in row:
                ran = run(entry, quick)
                row["turns"] += [ran.pop("ms")] if "ms" in ran else []
                row |= ran
                print(f"  {turn + 1}: {json.dumps(row)}", file=sys.stderr, flush=True)
    return [_with_spread(row) for row in merged(rows)]


def merged(rows: Sequence[Row]) -> list[Row]:
    """Return rows in which every engine stands once: names that gave the same engine are joined."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        name = ", ".join(part for part in (row["contestant"], row.get("engine", "")) if part)
        row = {**row, "contestant": name}
        key = (name, row["work"], row["processes"], str(row["threads"]), row.get("error", ""))
        if key in found:
            row["turns"] = [*found[key]["turns"], *row["turns"]]
            row["requested"] = f"{found[key]['requested']}, {row['requested']}"
        found[key] = row
    return list(found.values())


def _with_spread(row: Row) -> Row:
    turns = row["turns"]
    return {**row, **Timing(tuple(turns)).row(), "turns": turns} if turns else row


def run(entry: Entry, quick: bool) -> Row:
    """Run one turn of an entry in a separate process."""
    contestant, work = entry.contestant, entry.work
    warm, counted = (1, 2) if quick else ROUNDS[work]
    script = str(HERE / f"{contestant.script}.py")
    engine = [contestant.engine] if contestant.engine else []
    command = [entry.python, *entry.launcher, script, work, str(warm + counted), *engine]
    command += ["--device", entry.device]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(entry.threads)}
    if entry.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # some use a GPU wherever there is one
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    printed = next(line for line in done.stdout.splitlines() if line.startswith('{"ms"'))
    result: Row = json.loads(printed)
    return {**result, "ms": round(statistics.median(result["ms"][warm:]), 2)}


def table(rows: list[Row], work: str) -> str:
    """Return the best configuration of each contestant and engine, and its ratio to the fastest."""
    timed = [row for row in rows if row["work"] == work and "ms" in row]
    ours = min((r["ms"] for r in timed if "auto" in r["requested"]), default=None)
    cells = []
    for name in dict.fromkeys(row["contestant"] for row in timed):
        row = min((r for r in timed if r["contestant"] == name), key=lambda row: row["ms"])
        ratio = f"{row['ms'] / ours:.1f}" if ours else "-"
        how = f"{row['processes']}, {row['threads']} thread(s)"
        ms = f"{row['ms']:,.1f} ({row['ms_min']:,.1f}-{row['ms_max']:,.1f})"
        cells.append([name, how, ms, str(len(row["turns"])), ratio])
    head = [work, "best of its configurations", "ms per round", "turns", "x what auto takes"]
    return text_table(head, cells)


def has(python: str, module: str) -> bool:
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="this package and its peers, side by side")
    for peer in ("pfl", "flower", "fluke"):
        parser.add_argument(f"--{peer}", default=sys.executable, help="the Python that has it")
    parser.add_argument("--device", choices=USUAL, default="cpu")
    parser.add_argument("--work", choices=ROUNDS, action="append", help="W1, W2; on a GPU W3 too")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns per entry ({TURNS})")
    parser.add_argument("--quick", action="store_true", help="two rounds, for a dry run")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    pythons = {"pfl": args.pfl, "flwr": args.flower, "fluke": args.fluke}
    works, where = args.work or list(USUAL[args.device]), hardware(args.device)
    chosen = list(entries(pythons, works, args.device))
    rows = measure(chosen, args.turns, args.quick)
    print(f"{where}; median over turns (min-max)")
    for work in works:
        print(table(rows, work))
    write_record(args.out, where, rows, rounds=ROUNDS)


if __name__ == "__main__":
    main()
