"""Training paths against the next simpler one, on work that users run: does each earn its place?

A path should be at least twice as fast as the next simpler one on some work, median of five turns.
Whole rounds with planning, sums and server step, without evaluation. The paths of a case take
turns; a path is compared with the fastest of the simpler ones and with the loop, turn by turn, and
ratios are printed with their range. The engine is the one that the record names. Small models get
one thread, as on the command line, large ones all cores.

    python benchmarks/engines.py --json benchmarks/records/DATE-cpu-engines.json
    python benchmarks/engines.py --device cuda --json benchmarks/records/DATE-CARD-engines.json
    python benchmarks/engines.py --turns 1 --tiny     # a dry run
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.data import Federation
from fedexp.engine import EngineChoice, EngineName, run_round
from fedexp.engine.batched import Batched
from fedexp.engine.plan import Work, sample_cohort
from fedexp.precision import Precision, arithmetic, default_precision
from fedexp.tasks import Task
from fedexp.tasks.recipe import PAPER_TRAINING
from machine import Rounds, Row, Timing, cores, hardware, ratio, take_turns, write_record
from peers_work import WORKS

TURNS = 5
SMALL_MODEL = 100_000  # parameters; below, one thread is fastest
# "batched" takes the implementation it likes best; these two name it.
IMPLEMENTATIONS = {"batched-vmap": "vmap", "batched-layers": "layers"}


@dataclass(frozen=True)
class Case:
    """A task and the training paths to compare on it.

    Attributes:
        task: returns the task.
        paths: names of engines, or of `IMPLEMENTATIONS`, the simplest first.
        cohort: clients per round.
        rounds: rounds per turn; more for fast ones, so that a turn can be timed.
        devices: where the comparison makes sense.
    """

    task: Callable[[], Task]
    paths: tuple[str, ...]
    cohort: int = 20
    rounds: int = 1
    devices: tuple[str, ...] = ("cpu",)


class Perceptron(nn.Module):
    """A dense network written as a class, for which the dense engine does not apply."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.hidden(x).relu())
        return out


class Attention(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0)
        q, k, v = (each.transpose(-2, -3) for each in heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(-2, -3).flatten(-2))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class Transformer(nn.Module):
    """A small language model for next-character prediction: tokens [N, T] to scores."""

    def __init__(self, tokens: int = 90, length: int = 40, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Attention(width, 4) for _ in range(depth)))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.blocks(self.tokens(x) + self.places)[:, -1]))
        return out


def perceptron() -> Task:
    digits = fx.tasks.digits("mlp")
    return fx.tasks.classification("perceptron", Perceptron, digits.train, local=digits.local)


def images(
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    classes: int,
    steps: int = 20,
    batch: int = 50,
) -> Task:
    """Return generated images for 20 clients; their values do not matter for time."""
    draw, each = torch.Generator().manual_seed(0), max(2 * batch, 20)
    x = torch.randn(20 * each, *shape, generator=draw)
    y = torch.randint(classes, (len(x),), generator=draw)
    local = replace(PAPER_TRAINING, steps=steps, batch_size=batch)
    train = Federation({"x": x, "y": y}, np.arange(21) * each)
    return fx.tasks.classification("images", build, train, local=local)


def text(steps: int = 20, batch: int = 16) -> Task:
    """Return generated sequences of 40 tokens for 20 clients."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(90, (20 * 64, 40), generator=draw)
    y = torch.randint(90, (len(x),), generator=draw)
    local = replace(PAPER_TRAINING, steps=steps, batch_size=batch)
    train = Federation({"x": x, "y": y}, np.arange(21) * 64)
    return fx.tasks.classification("text", Transformer, train, local=local)


def cases(tiny: bool) -> dict[str, Case]:
    """Return the cases by name; `tiny` ones train fewer clients and steps, for a dry run."""
    work = WORKS["W2"]
    steps, batch, few = (1, 4, 2) if tiny else (20, 50, 8)
    emnist = partial(images, fx.models.emnist_cnn, (1, 28, 28), 62, steps, batch)
    cifar = partial(images, fx.models.cifar_cnn, (3, 32, 32), 10, steps, batch)
    resnet = partial(images, partial(fx.models.resnet18, 10), (3, 32, 32), 10)
    pfl = partial(images, work.build, (3, 32, 32), 10, 1 if tiny else 5, work.batch)
    mlp = partial(images, partial(fx.models.mlp, 64, 64, 10), (64,), 10, steps, batch)
    many, gpu = 2 if tiny else 20, ("cuda",)
    vmap_layers = ("loop", "batched-vmap", "batched-layers")
    return {
        "synthetic regression": Case(fx.tasks.synthetic, ("loop", "quadratic"), rounds=5),
        "digits, logistic": Case(fx.tasks.digits, ("loop", "threads", "dense"), 10, 2),
        "digits, MLP": Case(
            fx.tasks.digits_mlp, ("loop", "threads", "batched-layers", "dense"), 10, 2
        ),
        "digits, MLP as a class": Case(perceptron, vmap_layers, 10, 2),
        "EMNIST CNN": Case(emnist, ("loop", "threads"), few),
        "CIFAR CNN": Case(cifar, ("loop", "threads"), few),
        "pfl's CNN": Case(pfl, ("loop", "threads"), few),
        "ResNet-18": Case(partial(resnet, 1, 4 if tiny else 8), ("loop", "threads"), few // 2),
        "transformer": Case(
            partial(text, steps if tiny else 5), ("loop", "threads", "batched-vmap"), few
        ),
        "MLP, GPU": Case(mlp, vmap_layers, many, 10, gpu),
        "transformer, GPU": Case(partial(text, steps), ("loop", "batched-vmap"), many, 1, gpu),
        "pfl's CNN, GPU": Case(pfl, vmap_layers, many, 1, gpu),
        "EMNIST CNN, GPU": Case(emnist, vmap_layers, many, 1, gpu),
        "ResNet-18, GPU": Case(partial(resnet, steps, batch), vmap_layers, many, 1, gpu),
    }


def training(
    path: str, task: Task, cohort: int, device: str, precision: Precision | None
) -> Iterator[fx.Record]:
    """Return the rounds of FedExP by a training path, without end and without evaluation."""
    if path in IMPLEMENTATIONS:
        return _by_class(path, task, cohort, device, precision)
    assert path in get_args(EngineName)
    never: Any = 10**9
    return fx.simulate(
        task, fx.fedexp(), never, cohort, evaluate_every=never, engine=cast(EngineName, path),
        device=device, precision=precision,
    )  # fmt: skip


def _by_class(
    path: str, task: Task, cohort: int, device: str, precision: Precision | None
) -> Iterator[fx.Record]:
    """Yield the rounds of one implementation of the batched engine, on data on the device."""
    place = torch.device(device)
    precision = precision or default_precision(place)
    task, algorithm = task.to(place, precision), fx.fedexp()
    engine = Batched(cast(Any, IMPLEMENTATIONS[path]))
    choice = EngineChoice("batched", "given by the benchmark", IMPLEMENTATIONS[path])
    state, number = fx.SimulationState.initial(task, algorithm, 0), 0
    while True:
        number += 1
        clients = sample_cohort(0, number, task.train.clients, cohort)
        work = Work(task, algorithm, task.local, "uniform", 0, number, clients)
        with arithmetic(precision):
            record = run_round(work, state, engine)
        state = record.state
        yield replace(record, engine_choice=record.engine_choice or choice)


def compare(
    name: str, case: Case, turns: int, device: str, precision: Precision | None
) -> list[Row]:
    """Return one row per training path of a case; a path that fails has its error."""
    task = case.task()
    size = task.objective.initial(0)[0].numel()
    threads = 1 if size < SMALL_MODEL else cores()
    torch.set_num_threads(threads)
    runs, rows = dict[str, Rounds](), list[Row]()
    for path in case.paths:
        run = Rounds(training(path, task, case.cohort, device, precision), device, case.rounds)
        row: Row = {"case": name, "path": path, "parameters": size, "threads": threads}
        try:
            run()  # a path that cannot train the model fails here, and does not stop the rest
            runs[path] = run
            rows.append({**row, "engine": run.engine})
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            rows.append({**row, "error": f"{type(error).__name__}: {reason}"})
    taken = take_turns(runs, turns, warm=1)
    taken = {path: Timing(tuple(t / case.rounds for t in taken[path].turns)) for path in taken}
    simpler: list[str] = []
    for row in rows:
        path = row["path"]
        if path in taken:
            row |= {"cohort": case.cohort, "rounds_per_turn": case.rounds, **taken[path].row()}
            if simpler:
                fastest = min(simpler, key=lambda each: taken[each].median)
                row |= {"simpler": fastest, **_ratio("times", taken[fastest], taken[path])}
                row |= _ratio("times_loop", taken[simpler[0]], taken[path])
            simpler.append(path)
        print(f"  {json.dumps(row)}", file=sys.stderr, flush=True)
    return rows


def _ratio(name: str, slower: Timing, faster: Timing) -> Row:
    times = ratio(slower, faster)
    values = {name: times.median, f"{name}_min": min(times.turns), f"{name}_max": max(times.turns)}
    return {key: round(value, 2) for key, value in values.items()}


def table(rows: list[Row]) -> str:
    """Return one line per training path: milliseconds per round, and ratios to simpler paths."""
    cells = []
    for row in rows:
        names = [row["case"], row.get("engine", row["path"])]
        if "error" in row:
            cells.append([*names, row["error"], "", "", ""])
            continue
        ms = f"{row['ms']:,.1f} ({row['ms_min']:,.1f}-{row['ms_max']:,.1f})"
        ratios = ["", "", ""]
        if "times" in row:
            ratios = [_shown(row, "times_loop"), f"{_shown(row, 'times')} {row['simpler']}"]
            ratios.append("yes" if row["times"] >= 2 else "no")
        cells.append([*names, ms, *ratios])
    head = ["case", "engine", "ms per round", "x loop", "x fastest simpler path", "2x"]
    return text_table(head, cells)


def _shown(row: Row, name: str) -> str:
    return f"{row[name]} ({row[f'{name}_min']}-{row[f'{name}_max']})"


def main() -> None:
    parser = argparse.ArgumentParser(description="training paths against the next simpler one")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", choices=get_args(Precision), help="of the model")
    parser.add_argument("--turns", type=int, default=TURNS, help=f"turns per path ({TURNS})")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--tiny", action="store_true", help="few clients and steps, for a dry run")
    parser.add_argument("--json", "--out", type=Path, dest="out", help="write the rows as JSON")
    args = parser.parse_args()
    where, rows = hardware(args.device), list[Row]()
    for name, case in cases(args.tiny).items():
        if args.device in case.devices and any(each in name for each in args.case or [""]):
            rows += compare(name, case, args.turns, args.device, args.precision)
    print(f"{where}; FedExP, median of {args.turns} turns (min-max), ratios turn by turn")
    print(table(rows))
    write_record(args.out, where, rows, turns=args.turns, precision=args.precision)


if __name__ == "__main__":
    main()
