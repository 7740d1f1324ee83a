"""Whole rounds on an H200, bf16: MLP 1.3 ms, pfl's CNN 7.3, EMNIST CNN 18, ResNet-18 236.

torch 2.11.0, CUDA 13, median of 7 rounds, 2026-11-15; the rows are in `records/`. A round is
planning, local training, sums, server step and record.

Four pieces of work on generated data, in several forms (eager, a CUDA graph a round, SCAFFOLD, the
plain loop) and in bf16 and tf32. Prints a table and, with --out, writes it as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation, Images
from fedexp.engine.batched import Batched
from fedexp.engine.loop import Engine, Loop
from fedexp.engine.plan import Work, sample_cohort
from fedexp.engine.simulation import run_round
from fedexp.precision import Precision, arithmetic
from fedexp.tasks import Task
from fedexp.tasks.recipe import PAPER_TRAINING
from peers_work import pfl_cnn

Row = dict[str, Any]


def pixels(clients: int, each: int, shape: tuple[int, ...], classes: int) -> Federation:
    """Random images and labels; what they show does not matter for time."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * each, *shape), dtype=np.uint8)
    fields = {"x": torch.from_numpy(x), "y": torch.from_numpy(rng.integers(0, classes, len(x)))}
    return Federation(fields, np.arange(clients + 1) * each)


def works(tiny: bool) -> dict[str, tuple[Callable[[], Task], int]]:
    """Tasks by name, with their cohort; tiny ones for a trial on a CPU."""
    few = 8 if tiny else 100
    colour = Images((0.5,) * 3, (0.25,) * 3)
    one_epoch = fx.LocalTraining(lr=0.1, epochs=1, batch_size=10)
    plain = partial(Images, augment=None)
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
    }


def milliseconds(
    task: Task, algorithm: fx.Algorithm, cohort: int, engine: Engine, rounds: int
) -> float:
    """The median of whole rounds, after two that warm up."""
    state = fx.SimulationState.initial(task, algorithm, 0)
    times = []
    for t in range(1, rounds + 3):
        clients = sample_cohort(0, t, task.train.clients, cohort)
        began = time.perf_counter()
        work = Work(task, algorithm, task.local, "uniform", 0, t, clients)
        state = run_round(work, state, engine).state
        if state.params.is_cuda:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times[2:])


def measure(names: list[str], device: torch.device, tiny: bool, forms: list[str]) -> list[Row]:
    rows: list[Row] = []
    on_gpu = device.type == "cuda"
    precisions: tuple[Precision, ...] = ("bf16", "tf32") if on_gpu else ("float32",)
    for name, (build, cohort) in works(tiny).items():
        if not any(wanted in name for wanted in names):
            continue
        for precision in precisions:
            task = build().to(device, precision)
            for form in forms:
                few = tiny or form == "loop"
                rows.append(_row(name, task, cohort, precision, form, 1 if few else 7))
                print(rows[-1], flush=True)
    return rows


def _row(name: str, task: Task, cohort: int, precision: Precision, form: str, rounds: int) -> Row:
    algorithm = fx.scaffold() if form.startswith("scaffold") else fx.fedexp()
    engines: dict[str, Engine] = {
        "loop": Loop(),
        "eager": Batched("layers", graphs=False),
        "graph": Batched("layers"),
        "scaffold": Batched("layers"),
    }
    engine = engines[form]
    torch._dynamo.reset()  # every row compiles its own program
    row: Row = {"work": name, "precision": precision, "form": form}
    began = time.perf_counter()
    try:
        with arithmetic(precision):
            row["ms"] = round(milliseconds(task, algorithm, cohort, engine, rounds), 2)
    except Exception as error:  # a form that fails must not cost the others
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return {**row, "took_s": round(time.perf_counter() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--work", action="append", default=[])
    parser.add_argument("--forms", default="eager,graph,scaffold")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows = measure(args.work or [""], device, args.tiny, args.forms.split(","))
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}")
    cells = [[r["work"], r["precision"], r["form"], str(r.get("ms", "failed"))] for r in rows]
    print(text_table(["work", "precision", "form", "ms a round"], cells))
    if args.out:
        args.out.write_text(json.dumps({"device": where, "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
