"""What a round costs on several ranks of one machine, and what joining them costs.

FedExP, and SCAFFOLD whose clients keep states, on MLPs with one hidden layer, 20 steps of batches
of 20, generated data, no evaluation, one thread a rank. Every number of ranks is a job of its own;
the jobs take turns, and the best turn of each counts, so that ratios hold on a machine that is not
quite idle. More ranks than cores show what is lost, not what is gained.

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
from fedexp.engine.simulation import SingleProcess
from machine import Row, hardware, write_record

EACH, STEPS, BATCH, CLIENTS = 20, 20, 20, 1000
WARM, ROUNDS, TURNS = 2, 7, 2
WORKS: dict[str, tuple[int, int, Callable[[], fx.Algorithm]]] = {  # cohort, hidden width, rule
    "40 clients": (40, 64, fx.fedexp),
    "400 clients": (400, 64, fx.fedexp),
    "40 clients, large model": (40, 2048, fx.fedexp),
    "40 clients, SCAFFOLD": (40, 64, fx.scaffold),
    "40 clients, large model, SCAFFOLD": (40, 2048, fx.scaffold),
}
NUMBERS = (10**3, 10**5, 10**6, 10**7)  # of an all-reduce
MARK = "measured "


def milliseconds(among: Ranks | None, work: str, device: str) -> Row:
    """The median round of one work on this job's ranks."""
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
    process_group = DistributedGroup(among) if among else SingleProcess()
    where = str(among.device) if among and device == "cuda" else device
    run = fx.simulate(
        task, rule(), never, cohort, evaluate_every=never, device=where, process_group=process_group
    )
    taken = []
    for _ in range(WARM + ROUNDS):
        began = time.perf_counter()
        next(run)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    parameters = task.objective.initial(0)[0].numel()
    return {"work": work, "parameters": parameters, "ms": statistics.median(taken[WARM:])}


def joining(among: Ranks, numbers: int, device: str) -> Row:
    """The median all-reduce of so many float64."""
    buffer = torch.zeros(
        numbers, dtype=torch.float64, device=among.device if device == "cuda" else "cpu"
    )
    taken = []
    for _ in range(WARM + ROUNDS):
        among.all_reduce(
            torch.zeros(1, dtype=torch.float64, device=buffer.device)
        )  # all begin together
        began = time.perf_counter()
        among.all_reduce(buffer)
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(1e3 * (time.perf_counter() - began))
    return {"numbers": numbers, "ms": statistics.median(taken[WARM:])}


def measure(device: str) -> None:
    """What one rank of a job does; the first tells."""
    torch.set_num_threads(1)
    among = ranks()
    rounds = [milliseconds(among, work, device) for work in WORKS]
    joins = [joining(among, numbers, device) for numbers in NUMBERS] if among else []
    if among is None or among.is_first:
        print(MARK + json.dumps({"rounds": rounds, "joins": joins}), flush=True)
    leave()


def job(world: int, device: str) -> Row:
    """Start so many ranks, and hear what they measured."""
    mine = [str(Path(__file__).resolve()), "--measure", "--device", device]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *(launcher if world > 1 else []), *mine]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not told:
        sys.exit(f"{world} ranks said nothing:\n{done.stderr[-2000:]}")
    heard: Row = json.loads(told[-1].removeprefix(MARK))
    return heard


def best(turns: list[Row], part: str, place: int) -> Row:
    """The fastest of several measurements of one thing."""
    fastest: Row = min((turn[part][place] for turn in turns), key=lambda row: row["ms"])
    return fastest


def main() -> None:
    parser = argparse.ArgumentParser(description="rounds on several ranks")
    parser.add_argument("--worlds", default="1,2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--measure", action="store_true", help="be one rank of a job")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    if args.measure:
        measure(args.device)
        return
    where, worlds = hardware(args.device), [int(each) for each in args.worlds.split(",")]
    heard: dict[int, list[Row]] = {world: [] for world in worlds}
    for _ in range(TURNS):
        for world in worlds:
            heard[world].append(job(world, args.device))
    rounds, joins = {}, {}
    for world, turns in heard.items():
        rounds[world] = [best(turns, "rounds", k) for k in range(len(WORKS))]
        joins[world] = [best(turns, "joins", k) for k in range(len(turns[0]["joins"]))]
    print(table(rounds), joined(joins), where, sep="\n\n")
    rows = [{"ranks": w, **row} for w, own in rounds.items() for row in own]
    write_record(
        args.out, where, rows, joins=[{"ranks": w, **r} for w, o in joins.items() for r in o]
    )


def table(rounds: dict[int, list[Row]]) -> str:
    """Works against ranks: milliseconds, and how many times as fast as one rank."""
    first, cells = next(iter(rounds.values())), []
    for k, one in enumerate(first):
        ms = [f"{own[k]['ms']:.1f} ({one['ms'] / own[k]['ms']:.2f} x)" for own in rounds.values()]
        cells.append([one["work"], f"{one['parameters']:,}", *ms])
    return text_table(["ms a round", "parameters", *(f"{w} ranks" for w in rounds)], cells)


def joined(joins: dict[int, list[Row]]) -> str:
    """What an all-reduce takes, and how many bytes a second that is."""
    several = {world: own for world, own in joins.items() if own}
    cells = [
        [f"{numbers:,}", *(_speed(own[k]) for own in several.values())]
        for k, numbers in enumerate(NUMBERS)
    ]
    return text_table(["all-reduce of float64", *(f"{w} ranks" for w in several)], cells)


def _speed(row: Row) -> str:
    return f"{row['ms']:.2f} ms, {8 * row['numbers'] / row['ms'] / 1e6:.2f} GB/s"


if __name__ == "__main__":
    main()
