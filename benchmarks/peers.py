"""FedAvg side by side on a CPU, or on a GPU with --device cuda.

Three pieces of work, uniform weights, no evaluation, median of warm rounds:

- W1: MLP 64-64-10, 100 clients x 100 examples, 20 a round, 20 steps of batches of 50.
- W2: pfl-research's published benchmark: 1,000 clients x 50 images 3x32x32, 50 a round, one epoch
  of batches of 10, its CNN of two convolutions (`pfl_cnn` in `peers_work.py`).
- W3, on a GPU: the paper's ResNet-18, 100 clients x 500 images, 20 a round, 20 steps of batches of
  50; images are not augmented.

Every contestant runs alone in a process of its own, once with one thread and once with all cores,
and pfl also as one process for each core. All of them have their turn, then all again: the best
turn of the best configuration counts, of every contestant alike. A peer that is not installed is
skipped. Peers bring many dependencies, so give each a virtual environment of its own:

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
from machine import Row, cores, hardware, write_record

HERE = Path(__file__).parent
CORES = cores()
ROUNDS = {"W1": (3, 20), "W2": (1, 3), "W3": (2, 3)}  # to warm up, and counted
USUAL = {"cpu": ("W1", "W2"), "cuda": ("W1", "W2", "W3")}
TURNS = 3
LIMIT = 900  # seconds for one configuration
THREADS = tuple(sorted({1, CORES}))
Way = tuple[tuple[str, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Contestant:
    """A way to train.

    Attributes:
        name: in the table.
        script: its file, less the ending.
        form: what the script is told.
        works: the work it does.
        module: must be importable for it.
        install: the line that installs it.
        ways: configurations to try: what stands before the script, and numbers of threads.
        devices: where it can be compared.
    """

    name: str
    script: str
    form: str = ""
    works: tuple[str, ...] = ("W1", "W2", "W3")
    module: str = "torch"
    install: str = "pip install -e ."
    ways: dict[str, Way] = field(default_factory=lambda: {"1 process": ((), THREADS)})
    devices: tuple[str, ...] = ("cpu", "cuda")


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={CORES}")
CONTESTANTS = [
    Contestant("fedexp", "peers_ours", "auto"),
    Contestant("fedexp, bf16", "peers_ours", "auto/bf16", devices=("cuda",)),
    Contestant("fedexp, batched", "peers_ours", "batched", devices=("cpu",)),
    Contestant("fedexp, loop", "peers_ours", "loop"),
    Contestant("sequential PyTorch", "peers_sequential"),
    Contestant(
        "pfl",
        "peers_pfl",
        module="pfl",
        install="pip install 'pfl[pytorch]==0.6.0'",
        ways={"1 process": ((), THREADS), f"torchrun x {CORES}": (TORCHRUN, (1,))},
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
    """All that can run here; on a GPU in one process, whose threads hardly matter."""
    for contestant in [each for each in CONTESTANTS if device in each.devices]:
        python = python_of.get(contestant.module, sys.executable)
        if not has(python, contestant.module):
            print(f"{contestant.name}: skipped; {contestant.install}", file=sys.stderr)
            continue
        for work in [name for name in contestant.works if name in works]:
            ways = contestant.ways if device == "cpu" else {"1 process": ((), (CORES,))}
            for processes, (launcher, numbers) in ways.items():
                for threads in numbers:
                    yield Entry(contestant, python, work, processes, launcher, threads, device)


def measure(chosen: Sequence[Entry], turns: int, quick: bool) -> list[Row]:
    """A row for each entry, with the median of each of its turns."""
    rows: list[Row] = [
        {
            "contestant": entry.contestant.name,
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
    return [{**row, "ms": min(row["turns"])} if row["turns"] else row for row in rows]


def run(entry: Entry, quick: bool) -> Row:
    """One turn of an entry, in a process of its own."""
    contestant, work = entry.contestant, entry.work
    warm, counted = (1, 2) if quick else ROUNDS[work]
    script = str(HERE / f"{contestant.script}.py")
    form = [contestant.form] if contestant.form else []
    command = [entry.python, *entry.launcher, script, work, str(warm + counted), *form]
    command += ["--device", entry.device]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": str(entry.threads)}
    if entry.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # some take a GPU wherever there is one
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {LIMIT} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ms"')))
    return {"ms": round(statistics.median(told["ms"][warm:]), 2), "versions": told["versions"]}


def best(rows: list[Row], contestant: str, work: str) -> Row | None:
    mine = [r for r in rows if (r["contestant"], r["work"]) == (contestant, work) and "ms" in r]
    return min(mine, key=lambda row: row["ms"]) if mine else None


def table(rows: list[Row], work: str) -> str:
    """The best configuration of each, and how many times as long as ours it takes."""
    ours = best(rows, CONTESTANTS[0].name, work)
    cells = []
    for contestant in CONTESTANTS:
        row = best(rows, contestant.name, work)
        if row is not None:
            ratio = f"{row['ms'] / ours['ms']:.1f}" if ours else "-"
            how = f"{row['processes']}, {row['threads']} thread(s)"
            cells.append([contestant.name, how, f"{row['ms']:.1f}", ratio])
    return text_table([work, "best of its configurations", "ms a round", "x fedexp"], cells)


def has(python: str, module: str) -> bool:
    if shutil.which(python) is None:
        return False
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="this package and its peers, side by side")
    for peer in ("pfl", "flower", "fluke"):
        parser.add_argument(f"--{peer}", default=sys.executable, help="the python that has it")
    parser.add_argument("--device", choices=USUAL, default="cpu")
    parser.add_argument("--work", choices=ROUNDS, action="append", help="W1, W2; on a GPU W3 too")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"of every entry ({TURNS})")
    parser.add_argument("--quick", action="store_true", help="two rounds, to see that it runs")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    pythons = {"pfl": args.pfl, "flwr": args.flower, "fluke": args.fluke}
    works, where = args.work or list(USUAL[args.device]), hardware(args.device)
    chosen = list(entries(pythons, works, args.device))
    rows = measure(chosen, args.turns, args.quick)
    print(where)
    for work in works:
        print(table(rows, work))
    write_record(args.out, where, rows, rounds=ROUNDS)


if __name__ == "__main__":
    main()
