"""The time of a round on several ranks of one machine, and of the all-reduce alone.

FedExP, and SCAFFOLD with client state, on MLPs with one hidden layer, 20 steps of batches of 20,
generated data, no evaluation, one thread per rank. Every number of ranks is a separate job; jobs
take turns, and the median over turns is reported with its range. More ranks than cores show the
overhead, not the gain.

    python benchmarks/ranks.py --out benchmarks/records/DATE-cpu-ranks.json
    python benchmarks/ranks.py --device cuda --worlds 1,2,4,8 --out benchmarks/records/DATE-CARD-ranks.json
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation
from fedexp.distributed import DistributedGroup, Ranks, leave, ranks
from fedexp.engine.simulation import ProcessGroup
from machine import Row, Timing, hardware, write_record

EACH, STEPS, BATCH, CLIENTS = 20, 20, 20, 1000
WARM, ROUNDS, TURNS = 2, 7, 5
WORKS: dict[str, tuple[int, int, Callable[[], fx.Algorithm]]] = {  # cohort, hidden width, rule
    "40 clients": (40, 64, fx.fedexp),
    "400 clients": (400, 64, fx.fedexp),
    "40 clients, large model": (40, 2048, fx.fedexp),
    "40 clients, SCAFFOLD": (40, 64, fx.scaffold),
    "40 clients, large model, SCAFFOLD": (40, 2048, fx.scaffold),
}
NUMBERS = (10**3, 10**5, 10**6, 10**7)  # of an all-reduce
MARK = "measured "


def milliseconds(among: Ranks | None, work: str, device: str, rounds: int) -> Row:
    """Return the median round of one work on this job's ranks, and the engine that ran."""
    cohort, width, rule = WORKS[work]
    draw = torch.Generator().manual_seed(0)
    rows = CLIENTS * EACH
    x, y = torch.randn(rows, 64, generator=draw), torch.randint(10, (rows,), generator=draw)
    task = fx.tasks.classification(
        "ranks",
        partial(fx.models.mlp, 64, width, 10),
        Federation({"x": x, "y": y}, np.arange(CLIENTS + 1) * EACH),
        local=fx.LocalTraining(lr=0.05, steps=STEPS, batch_size=BATCH),
    )
    never = 10**9
    process_group = DistributedGroup(among) if among else ProcessGroup()
    where = str(among.device) if among and device == "cuda" else device
    run = fx.simulate(
        task, rule(), never, cohort, evaluate_every=never, device=where, process_group=process_group
    )
    taken, engine = [], ""
    for _ in range(WARM + rounds):
        began = time.perf_counter()
        engine = next(run).engine
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    parameters = task.objective.initial(0)[0].numel()
    row = {"work": work, "engine": engine, "parameters": parameters}
    return {**row, "ms": statistics.median(taken[WARM:])}


def joining(among: Ranks, numbers: int, device: str) -> Row:
    """Return the median time of an all-reduce of `numbers` float64."""
    buffer = torch.zeros(
        numbers, dtype=torch.float64, device=among.device if device == "cuda" else "cpu"
    )
    taken = []
    for _ in range(WARM + ROUNDS):
        among.all_reduce(torch.zeros(1, dtype=torch.float64, device=buffer.device))  # a barrier
        began = time.perf_counter()
        among.all_reduce(buffer)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    return {"numbers": numbers, "ms": statistics.median(taken[WARM:])}


def measure(device: str, rounds: int) -> None:
    """Run one rank of a job; the first rank prints the result."""
    torch.set_num_threads(1)
    among = ranks()
    timed = [milliseconds(among, work, device, rounds) for work in WORKS]
    joins = [joining(among, numbers, device) for numbers in NUMBERS] if among else []
    if among is None or among.is_first:
        print(MARK + json.dumps({"rounds": timed, "joins": joins}), flush=True)
    leave()


def job(world: int, device: str, rounds: int) -> Row:
    """Start `world` ranks and return their measurements."""
    script = [str(Path(__file__).resolve()), "--measure", "--device", device]
    script += ["--rounds", str(rounds)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *(launcher if world > 1 else []), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not printed:
        sys.exit(f"{world} ranks failed:\n{done.stderr[-2000:]}")
    result: Row = json.loads(printed[-1].removeprefix(MARK))
    return result


def over_turns(turns: list[Row], part: str) -> list[Row]:
    """Return the rows of a part with their median and range over turns."""
    rows = zip(*(turn[part] for turn in turns), strict=True)
    return [{**same[0], **Timing(tuple(row["ms"] for row in same)).row()} for same in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds on several ranks")
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--turns", type=int, default=TURNS, help=f"jobs per world size ({TURNS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds per job ({ROUNDS})")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    if args.measure:
        measure(args.device, args.rounds)
        return
    where, worlds = hardware(args.device), [int(each) for each in args.worlds.split(",")]
    results: dict[int, list[Row]] = {world: [] for world in worlds}
    for _ in range(args.turns):
        for world in worlds:
            results[world].append(job(world, args.device, args.rounds))
    rounds = {world: over_turns(turns, "rounds") for world, turns in results.items()}
    joins = {world: over_turns(turns, "joins") for world, turns in results.items()}
    print(table(rounds), joined(joins), sep="\n\n")
    print(f"\n{where}, one thread per rank; median of {args.turns} turns (min-max)")
    rows = [{"ranks": w, **row} for w, own in rounds.items() for row in own]
    write_record(
        args.out, where, rows, joins=[{"ranks": w, **r} for w, o in joins.items() for r in o]
    )


def table(rounds: dict[int, list[Row]]) -> str:
    """Return one line per work and number of ranks, with the speed-up over the first number."""
    first, cells = next(iter(rounds.values())), []
    for k, one in enumerate(first):
        for world, own in rounds.items():
            row = own[k]
            ms = f"{row['ms']:.1f} ({row['ms_min']:.1f}-{row['ms_max']:.1f})"
            times = f"{one['ms'] / row['ms']:.2f}"
            cells.append(
                [row["work"], f"{row['parameters']:,}", row["engine"], f"{world}", ms, times]
            )
    head = ["work", "parameters", "engine", "ranks", "ms per round", "speed-up"]
    return text_table(head, cells)


def joined(joins: dict[int, list[Row]]) -> str:
    """Return the times of the all-reduce, and bytes per second."""
    several = {world: own for world, own in joins.items() if own}
    cells = [
        [f"{numbers:,}", *(_speed(own[k]) for own in several.values())]
        for k, numbers in enumerate(NUMBERS)
    ]
    return text_table(["all-reduce of float64", *(f"{w} ranks" for w in several)], cells)


def _speed(row: Row) -> str:
    spread = f"{row['ms_min']:.2f}-{row['ms_max']:.2f}"
    return f"{row['ms']:.2f} ms ({spread}), {8 * row['numbers'] / row['ms'] / 1e6:.2f} GB/s"


if __name__ == "__main__":
    main()
