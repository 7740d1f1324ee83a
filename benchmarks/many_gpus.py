"""A cost model of a round on many GPUs, with very many clients. Nothing is trained.

    seconds = training of the largest share + all-reduce + server step [+ client state]

It takes the measured round of one H200 (engine batched (layers) with CUDA graphs, `records/`) and
the assumptions below, and prints the prediction for 1 to 64 GPUs and three networks. It measures
what grows with the federation and not with the GPUs: drawing a cohort, and bytes per client.

    python benchmarks/many_gpus.py
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from fedexp.analysis.tables import text_table
from fedexp.engine.plan import sample_cohort
from machine import Row, hardware, write_record

RECORD = Path(__file__).parent / "records" / "2026-11-15-h200-boxes.json"
WIDE, NARROW = 8, 4  # bytes of a number in a sum, and in a parameter or client state
MEMORY = 4.0e12  # bytes per second of an H200's memory, of the 4.8e12 of its data sheet
FIXED = 1.0e-3  # seconds per round that more GPUs do not shorten: planning, launching, reading back
STEP_PASSES = 6  # times that the server step reads or writes the model
GPUS = (1, 2, 4, 8, 16, 32, 64)
FEDERATIONS = (10**6, 10**7, 10**8)


@dataclass(frozen=True)
class Network:
    """The network of the GPUs; `bandwidth` per GPU and direction in a ring, in bytes per second."""

    name: str
    bandwidth: float
    latency: float


# Assumptions, from data sheets and common experience. A ring enters each machine once, whatever its
# number of GPUs; the latency is that of one message.
NETWORKS = (
    Network("NVLink inside a machine", 300e9, 5e-6),
    Network("InfiniBand, 400 Gbit/s per GPU", 40e9, 10e-6),
    Network("Ethernet, 25 Gbit/s per machine", 2.5e9, 50e-6),
)


@dataclass(frozen=True)
class Workload:
    """A round as it was measured on one GPU.

    Attributes:
        seconds: of the whole round.
        cohort: clients in it.
        parameters: of the model.
    """

    name: str
    seconds: float
    cohort: int
    parameters: int


def all_reduce(numbers: int, gpus: int, network: Network) -> float:
    """Return the seconds of a ring: every GPU sends and receives 2 (G - 1) / G of the sums.

    >>> round(all_reduce(10**9, 2, Network("", 8e9, 0.0)), 6)
    1.0
    """
    if gpus == 1:
        return 0.0
    steps = 2 * (gpus - 1)
    return steps * network.latency + steps / gpus * WIDE * numbers / network.bandwidth


def server_step(parameters: int) -> float:
    """Return the seconds of the server step, which every GPU takes, at the speed of memory."""
    return STEP_PASSES * NARROW * parameters / MEMORY


def training(work: Workload, gpus: int, cohort: int) -> float:
    """Return the seconds of the GPU with the most clients; a client takes what it takes of 20."""
    each = (work.seconds - FIXED - server_step(work.parameters)) / work.cohort
    return FIXED + each * math.ceil(cohort / gpus)


def states(work: Workload, gpus: int, cohort: int, network: Network) -> float:
    """Return the seconds to send a cohort's new client state to every GPU (SCAFFOLD)."""
    if gpus == 1:
        return 0.0
    arriving = NARROW * work.parameters * cohort * (gpus - 1) / gpus
    return arriving / network.bandwidth


def seconds(
    work: Workload, gpus: int, cohort: int, network: Network, has_state: bool = False
) -> float:
    """Return the seconds of a round without any overlap."""
    vectors = 2 if has_state else 1  # SCAFFOLD sums the change of its control variates, too
    joined = all_reduce(vectors * work.parameters, gpus, network)
    sent = states(work, gpus, cohort, network) if has_state else 0.0
    return training(work, gpus, cohort) + joined + server_step(work.parameters) + sent


def measured() -> list[Workload]:
    """Return the measured rounds that the model starts from."""
    rows = {(row["work"], row["precision"], row["form"]): row["ms"] for row in _rows()}
    return [
        Workload("ResNet-18", rows["ResNet-18", "bf16", "graph"] / 1e3, 20, 11_173_962),
        Workload("EMNIST CNN", rows["EMNIST CNN", "bf16", "graph"] / 1e3, 20, 1_206_590),
    ]


def _rows() -> list[Row]:
    rows: list[Row] = json.loads(RECORD.read_text())["rows"]
    return rows


def speedups(work: Workload, cohort: int, has_state: bool) -> list[Row]:
    """Return the speed-up over one GPU, by network and number of GPUs."""
    rows = []
    for network in NETWORKS:
        alone = seconds(work, 1, cohort, network, has_state)
        for gpus in GPUS:
            taken = seconds(work, gpus, cohort, network, has_state)
            row = {"work": work.name, "cohort": cohort, "states": has_state, "gpus": gpus}
            rows.append({**row, "network": network.name, "ms": 1e3 * taken, "times": alone / taken})
    return rows


def table(rows: list[Row]) -> str:
    """Return a table of networks against GPUs."""
    cells = []
    for network in dict.fromkeys(row["network"] for row in rows):
        own = [row for row in rows if row["network"] == network]
        cells.append([network, *(f"{row['ms']:.1f} ({row['times']:.1f} x)" for row in own)])
    return text_table(["ms per round", *(f"{gpus} GPUs" for gpus in GPUS)], cells)


def federation(clients: int) -> Row:
    """Return the time to draw 1,000 clients of a federation, and its bytes."""
    taken = []
    for number in range(1, 6):
        began = time.perf_counter()
        sample_cohort(0, number, clients, 1000)
        taken.append(1e3 * (time.perf_counter() - began))
    offsets, slots = 16 * clients, 20 * clients  # first rows and sizes; index of client state
    state = NARROW * measured()[1].parameters * clients
    sizes = {"offsets_gb": offsets / 1e9, "index_gb": slots / 1e9, "states_tb": state / 1e12}
    return {"clients": clients, "draw_ms": min(taken), **sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description="a model of many GPUs and many clients")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    where, rows = hardware(), []
    for work in measured():
        for cohort, has_state in ((20, False), (640, False), (640, True)):
            predicted = speedups(work, cohort, has_state)
            rule = "SCAFFOLD" if has_state else "FedExP"
            print(
                f"{work.name}, {rule}, {cohort} clients per round", table(predicted), "", sep="\n"
            )
            rows += predicted
    kinds = [federation(clients) for clients in FEDERATIONS]
    names = ["clients", "drawing 1,000 (ms)", "offsets (GB)", "index (GB)", "EMNIST states (TB)"]
    print(text_table(names, [[f"{value:,.4g}" for value in row.values()] for row in kinds]))
    write_record(args.out, where, rows, federations=kinds)


if __name__ == "__main__":
    main()
