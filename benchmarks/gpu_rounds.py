"""Whole rounds on an H200, bf16, in ms: MLP 1.4, pfl's CNN 5.5, EMNIST CNN 14.3, ResNet-18 217.

Engine batched (layers) with CUDA graphs, torch 2.11.0, CUDA 13, median of 7 rounds, 2026-11-16;
ranges: 1.33-1.64, 5.5-5.6, 14.3-14.4, 214-235 (`records/2026-11-16-h200-rounds.json`). A round is
planning, local training, sums, server step and record.

Eight pieces of work on generated images and text, by several variants (eager, CUDA graphs,
SCAFFOLD, the loop) and in bf16 and tf32. Prints a table with the range and, with --out, writes it
as JSON.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation, Images
from fedexp.engine import run_round
from fedexp.engine.base import Engine
from fedexp.engine.batched import Batched
from fedexp.engine.loop import Loop
from fedexp.engine.plan import Work, sample_cohort
from fedexp.precision import Precision, arithmetic
from fedexp.tasks import Task
from fedexp.tasks.recipe import PAPER_TRAINING
from fedexp.tasks.shakespeare import counted_part, counting_objective
from machine import Row, Timing, hardware, write_record
from peers_work import pfl_cnn


def pixels(clients: int, each: int, shape: tuple[int, ...], classes: int) -> Federation:
    """Return random images and labels; their values do not matter for time."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(rng.integers(0, classes, len(x)))}
    return Federation(fields, np.arange(clients + 1) * each)


def characters(build: Callable[[int], nn.Module], batch: int, tiny: bool) -> Task:
    """Return next-character prediction on random sequences of 80 of 90 tokens, 12 steps per client.

    Every client has 48 sequences, and as many as a batch at least.
    """
    rng, each, clients = np.random.default_rng(0), max(48, batch), 2 if tiny else 20
    tokens = torch.from_numpy(rng.integers(1, 90, (clients * each, 81)))
    fields = {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}
    local = fx.LocalTraining(lr=0.1, steps=2 if tiny else 12, batch_size=batch)
    train = Federation(fields, np.arange(clients + 1) * each)
    task = fx.supervised("characters", partial(build, 90), train, fields, local=local)
    return replace(task, objective=counting_objective(task), counted=counted_part)


def works(tiny: bool) -> dict[str, tuple[Callable[[], Task], int]]:
    """Return tasks by name, with their cohort; tiny ones for a dry run on a CPU."""
    few = 8 if tiny else 100
    colour = Images((0.5,) * 3, (0.25,) * 3)
    one_epoch = fx.LocalTraining(lr=0.1, epochs=1, batch_size=10)
    plain = partial(Images, augment=None)
    models: dict[str, Callable[[int], nn.Module]] = {
        "character LSTM": fx.models.char_lstm,
        "character transformer": partial(fx.models.char_transformer, length=80),
    }
    return {
        "MLP 64-64-10": (
            lambda: fx.tasks.classification(
                "mlp",
                partial(fx.models.mlp, 64, 64, 10),
                pixels(few, 100, (1, 8, 8), 10),
                transform=plain((0.5,), (0.25,)),
                local=fx.LocalTraining(lr=0.1, steps=20, batch_size=50),
            ),
            4 if tiny else 20,
        ),
        "pfl's CNN, 50 x 5 x 10": (
            lambda: fx.tasks.classification(
                "cnn",
                pfl_cnn,
                pixels(few if tiny else 1000, 50, (3, 32, 32), 10),
                transform=plain((0.5,) * 3, (0.25,) * 3),
                local=one_epoch,
            ),
            4 if tiny else 50,
        ),
        "EMNIST CNN": (
            lambda: fx.tasks.classification(
                "emnist",
                fx.models.emnist_cnn,
                pixels(few, 200, (1, 28, 28), 62),
                transform=plain((0.0,), (1.0,)),
                local=PAPER_TRAINING,
            ),
            4 if tiny else 20,
        ),
        "ResNet-18": (
            lambda: fx.tasks.classification(
                "resnet",
                partial(fx.models.resnet18, 10),
                pixels(few, 500, (3, 32, 32), 10),
                transform=colour,
                local=PAPER_TRAINING,
            ),
            2 if tiny else 20,
        ),
        **{
            f"{name}, 10 x 12 x {batch}": (
                partial(characters, build, batch, tiny),
                2 if tiny else 10,
            )
            for name, build in models.items()
            for batch in (4, 50)
        },
    }


def milliseconds(
    task: Task, algorithm: fx.Algorithm, cohort: int, engine: Engine, rounds: int
) -> tuple[str, Timing]:
    """Return the engine that ran, and the time of whole rounds after two that warm up."""
    state = fx.SimulationState.initial(task, algorithm, 0)
    times, name = [], engine.name
    for t in range(1, rounds + 3):
        clients = sample_cohort(0, t, task.train.clients, cohort)
        began = time.perf_counter()
        work = Work(task, algorithm, task.local, "uniform", 0, t, clients)
        record = run_round(work, state, engine)
        state, name = record.state, record.engine or engine.name
        if state.params.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return name, Timing(tuple(times[2:]))


def measure(
    names: list[str], device: torch.device, tiny: bool, variants: list[str], rounds: int
) -> list[Row]:
    """Return one row per work, precision and variant."""
    rows: list[Row] = []
    on_gpu = device.type == "cuda"
    precisions: tuple[Precision, ...] = ("bf16", "tf32") if on_gpu else ("float32",)
    for name, (build, cohort) in works(tiny).items():
        if not any(wanted in name for wanted in names):
            continue
        for precision in precisions:
            task = build().to(device, precision)
            for variant in variants:
                few = tiny or variant == "loop"
                rows.append(_row(name, task, cohort, precision, variant, 1 if few else rounds))
                print(rows[-1], flush=True)
    return rows


def _row(
    name: str, task: Task, cohort: int, precision: Precision, variant: str, rounds: int
) -> Row:
    algorithm = fx.scaffold() if variant == "scaffold" else fx.fedexp()
    engines: dict[str, Engine] = {
        "loop": Loop(),
        "eager": Batched("layers", graphs=False),
        "graph": Batched("layers"),
        "scaffold": Batched("layers"),
    }
    row: Row = {"work": name, "precision": precision, "variant": variant}
    row["algorithm"] = algorithm.name
    began = time.perf_counter()
    try:
        with arithmetic(precision):
            row["engine"], taken = milliseconds(task, algorithm, cohort, engines[variant], rounds)
        row |= taken.row()
    except Exception as error:  # a variant that fails must not stop the rest
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return {**row, "took_s": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="few clients, for a dry run")
    parser.add_argument("--work", action="append", default=[], help="part of a name")
    parser.add_argument("--variants", default="eager,graph,scaffold", help="and loop")
    parser.add_argument("--rounds", type=int, default=7, help="rounds counted (7)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, where = torch.device(args.device), hardware(args.device)
    variants = args.variants.split(",")
    rows = measure(args.work or [""], device, args.tiny, variants, args.rounds)
    print(f"{where}; median of n rounds (min-max)")
    cells = []
    for row in rows:
        names = [row["work"], row["precision"], row["algorithm"], row.get("engine", row["variant"])]
        cells.append([*names, _ms(row), str(row.get("turns", ""))])
    print(text_table(["work", "precision", "algorithm", "engine", "ms per round", "n"], cells))
    write_record(args.out, where, rows)


def _ms(row: Row) -> str:
    if "error" in row:
        return "failed"
    return f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})"


if __name__ == "__main__":
    main()
