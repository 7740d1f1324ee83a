"""SCAFFOLD among a million clients, whose state of 40 GB is stored in a file: memory over rounds.

Federations are generated, written to one file each and memory-mapped (`clients.py`): ten examples
of 64 bytes per client. A round is 1,000 clients x 5 steps of batches of 10 of an MLP of 10,060
parameters; the state of every client that took part is as large as the model. Rounds take turns
with those of a federation of 10,000 clients with the same store, so that their ratio holds on a
machine that is not idle. Evaluation, which reads all data, is left out.

Memory is that of this process (`/proc/self/status`). RssAnon is its private memory, `held` the same
after the C library has returned its free memory (`malloc_trim`). RssFile are pages of the mapped
data, which the system may drop at any time; VmHWM is the peak of both.

    python benchmarks/million.py --out benchmarks/records/DATE-cpu-million.json
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from clients import EACH, generate

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation, Images
from fedexp.engine import read_ahead
from fedexp.engine.client_store import ClientStore
from machine import Row, hardware, write_record

MANY, FEW, COHORT = 1_000_000, 10_000, 1_000
ROUNDS, BETWEEN = 200, 20
COLD = 5  # rounds whose reads are counted
IN_MEMORY = 40  # rounds with client state in memory, for comparison


def training(path: Path, store: ClientStore) -> Iterator[fx.Record]:
    """Return rounds without end."""
    task = fx.tasks.classification(
        "million",
        partial(fx.models.mlp, 64, 134, 10),
        Federation.open(path),
        transform=Images((0.5,), (0.25,), augment=None),
        local=fx.LocalTraining(lr=0.05, steps=5, batch_size=EACH),
    )
    never = 10**9
    return fx.simulate(task, fx.scaffold(), never, COHORT, evaluate_every=never, client_store=store)


def memory() -> dict[str, int]:
    """Return the memory of this process, in MB."""
    found = {name: _status(name) for name in ("RssAnon", "RssFile", "VmHWM")}
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)
    return {**found, "held": _status("RssAnon")}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith(name))


def megabytes(path: Path) -> int:
    """Return the size of a file on the disk, in MB."""
    return path.stat().st_blocks * 512 // 10**6


def side_by_side(folder: Path, rounds: int) -> list[Row]:
    """Return one row per 20 rounds; rounds of the large and the small federation take turns."""
    files = {n: folder / f"{n}.slots" for n in (MANY, FEW)}
    runs = {n: training(folder / f"{n}.npz", ClientStore("disk", files[n])) for n in files}
    times: dict[int, list[float]] = {n: [] for n in files}
    rows: list[Row] = []
    for number in range(1, rounds + 1):
        for n, run in runs.items():
            began = time.perf_counter()
            record = next(run)
            times[n].append(1e3 * (time.perf_counter() - began))
            if n == MANY and number % BETWEEN == 0:
                seen = len(record.state.clients)
                row = {"round": number, "engine": record.engine, "states": seen}
                rows.append({**row, "store_MB": megabytes(files[n])})
        del record  # it would hold slots that the next round could use
        if number % BETWEEN == 0:
            many, few = (statistics.median(times[n][-BETWEEN:]) for n in (MANY, FEW))
            ratios = [a / b for a, b in zip(*(times[n][-BETWEEN:] for n in files), strict=True)]
            rows[-1] |= {
                "many_ms": round(many),
                "few_ms": round(few),
                "ratio": round(many / few, 2),
                "ratio_min": round(min(ratios), 2),
                "ratio_max": round(max(ratios), 2),
            }
            rows[-1] |= memory()
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def growth_in_memory(path: Path) -> None:
    """Print the growth of the process in MB per round, with client state in memory."""
    run = training(path, ClientStore("memory"))
    for _ in range(IN_MEMORY // 4):
        next(run)
    before = memory()["held"]
    for _ in range(IN_MEMORY):
        next(run)
    print((memory()["held"] - before) / IN_MEMORY)


def cold(path: Path, ahead: bool) -> None:
    """Print the MB that a few rounds read of data that are not in memory yet."""
    if not ahead:
        read_ahead.LEAST_BYTES = 2**62
    run = training(path, ClientStore("memory"))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _read_from_disk()
    for _ in range(COLD):
        next(run)
    print((_read_from_disk() - before) / 1e6)


def _read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def apart(part: str, path: Path) -> float:
    """Return the number that a part prints, in a separate process."""
    again = [sys.executable, __file__, "--part", part, "--data", str(path)]
    return float(subprocess.run(again, check=True, stdout=subprocess.PIPE).stdout)


PARTS: dict[str, Callable[[Path], None]] = {
    "grow": growth_in_memory,
    "ahead": partial(cold, ahead=True),
    "not ahead": partial(cold, ahead=False),
}


def cells(rows: list[Row]) -> list[list[str]]:
    return [[v if isinstance(v, str) else f"{v:,}" for v in row.values()] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="SCAFFOLD's states of a million clients")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", type=Path, help="folder for temporary files of 10 GB")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    args, where = parser.parse_args(), hardware()
    torch.set_num_threads(1)
    if args.part:
        PARTS[args.part](args.data)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        for clients in (MANY, FEW):
            generate(folder / f"{clients}.npz", clients)
        path = folder / f"{MANY}.npz"
        read = {part: round(apart(part, path)) for part in ("ahead", "not ahead")}
        rows = side_by_side(folder, args.rounds)
        grown = apart("grow", path)
    print(f"{where}, 1 thread; medians of {BETWEEN} rounds, range of ratios")
    print(text_table(list(rows[0]), cells(rows)))
    print(f"with client state in memory: {grown:.0f} MB more per round")
    print(f"{COLD} cold rounds read {read['ahead']} MB; not read ahead, {read['not ahead']} MB")
    more = {"grows_in_memory_MB_per_round": round(grown, 1), "cold_rounds_read_MB": read}
    write_record(args.out, where, rows, threads=1, **more)


if __name__ == "__main__":
    main()
