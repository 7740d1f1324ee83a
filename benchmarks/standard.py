"""The field's standard tasks: this package, sequential PyTorch and pfl side by side.

MNIST with logistic regression, FEMNIST with a CNN, CIFAR-100 over 500 clients with ResNet-18, and
Shakespeare with an LSTM (and a transformer), each with the settings of `fedexp.tasks`: 10 clients
per round, one epoch of SGD. The published times of FLUTE and FedML are printed beside them; they
are of other hardware and include evaluations, so they are no comparison.

All contestants train the same cohorts, drawn from all clients, on the same examples, which are
on the device before the first round; images are not augmented. They take turns, round by round.
Sequential PyTorch trains one client after another with `nn` modules and `torch.optim.SGD`, cuDNN's
LSTM included, and reads nothing back from the device during a round; it and pfl compute in the same
precision as this package (autocast for bf16). This package is listed by the engine that ran.

    python benchmarks/standard.py                          # real data, in the data folder
    python benchmarks/standard.py --generated              # random data of the real shapes
    python benchmarks/standard.py --generated --device cuda --precision bf16 --out FILE

`--generated` needs no data. The sizes of its clients are those of the real data for Shakespeare (of
every tenth role), CIFAR-100 and MNIST (by the same draw); for FEMNIST they are normally distributed
with the real mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

import fedexp as fx
from fedexp.analysis.tables import text_table
from fedexp.catalogue import TASKS
from fedexp.errors import UsageError
from fedexp.precision import Precision, arithmetic, default_precision
from fedexp.tasks.shakespeare import PAD, counted_part, counting_objective
from fedexp.tasks.standard import power_law
from fedexp.tasks.supervised import supervised
from machine import Rounds, Row, Timing, hardware, take_turns, write_record

COHORT, WARM, TURNS, LR = 10, 2, 5, 0.1
Sizes = NDArray[np.int64]
# Sequences of every tenth of the 1,109 roles of the plays, in the order of their sizes.
ROLES = (
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 5, 5,
    5, 5, 6, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9, 9, 9, 9, 10, 11, 11, 12, 12, 12, 13, 13, 14, 14, 15,
    16, 16, 17, 17, 18, 19, 20, 20, 21, 22, 23, 24, 25, 27, 28, 30, 31, 32, 33, 35, 38, 39, 41,
    43, 45, 49, 51, 54, 55, 58, 60, 64, 67, 72, 74, 77, 81, 86, 92, 101, 107, 113, 117, 122,
    127, 135, 145, 154, 174, 199, 234, 276, 349,
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Times of whole runs with their evaluations, on other hardware, as hours:minutes:seconds."""

    flute: str
    fedml: str
    rounds: int

    def milliseconds(self, time: str) -> float:
        """Return the mean milliseconds per round.

        >>> Published("00:01:35", "00:03:09", 100).milliseconds("00:01:35")
        950.0
        """
        hours, minutes, seconds = map(int, time.split(":"))
        return 1e3 * (3600 * hours + 60 * minutes + seconds) / self.rounds


SOURCE = (
    "whole runs with evaluations, FLUTE's in 4 processes, on GPUs that are not named; README of "
    "microsoft/msrflute at 8bfe085, which has both (FedML 0.7.303, MPI)"
)
PUBLISHED = {
    "mnist": Published("00:01:35", "00:03:09", 100),
    "femnist": Published("00:08:22", "05:49:52", 1500),
    "fed-cifar100": Published("01:42:01", "15:55:36", 4000),
    "shakespeare": Published("00:21:50", "06:46:21", 1200),
}


@dataclass(frozen=True)
class Problem:
    """The work of all contestants.

    Attributes:
        name: of the task.
        build: returns a new model.
        fields: the examples of the clients in the cohorts, `x` as the model takes it, and `y`.
        offsets: client i has the rows offsets[i] to offsets[i + 1].
        cohorts: the clients of each round.
        batch: examples per batch.
        text: whether targets are tokens, of which padding does not count.
    """

    name: str
    build: Callable[[], nn.Module]
    fields: dict[str, Tensor]
    offsets: Sizes
    cohorts: tuple[tuple[int, ...], ...]
    batch: int
    text: bool

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, over tokens that count if it is text."""
        return F.cross_entropy(outputs, targets, ignore_index=PAD if self.text else -100)

    def on(self, device: str) -> Problem:
        return replace(self, fields={name: v.to(device) for name, v in self.fields.items()})

    def task(self) -> fx.Task:
        """Return the task of this package."""
        train = fx.Federation(self.fields, self.offsets)
        local = fx.LocalTraining(lr=LR, epochs=1, batch_size=self.batch)
        task = supervised(self.name, self.build, train, local=local)
        if not self.text:
            return task
        return replace(task, objective=counting_objective(task), counted=counted_part)

    def steps(self) -> list[int]:
        """Return the local steps of all clients of each round."""
        sizes = np.diff(self.offsets)
        return [int(sum(-(-sizes[c] // self.batch) for c in cohort)) for cohort in self.cohorts]


@dataclass(frozen=True)
class Generator:
    """Random data of the shapes of a task.

    Attributes:
        sizes: returns the examples of each client.
        build: returns a new model.
        shape: of an example.
        classes: number of classes or tokens.
        batch: examples per batch.
    """

    sizes: Callable[[np.random.Generator], Sizes]
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int

    @property
    def text(self) -> bool:
        return len(self.shape) == 1

    def fields(self, rows: int, rng: np.random.Generator) -> dict[str, Tensor]:
        """Return examples; their values do not matter for time. Texts have no padding."""
        shape = (rows, *self.shape)
        if self.text:
            return {n: torch.from_numpy(rng.integers(1, self.classes, shape)) for n in "xy"}
        x = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
        return {"x": x, "y": torch.from_numpy(rng.integers(0, self.classes, rows))}


def role_sizes(rng: np.random.Generator) -> Sizes:
    return np.repeat(ROLES, 10)[:1109]


def writer_sizes(rng: np.random.Generator) -> Sizes:
    return rng.normal(671_585 / 3400, 77, 3400).clip(19).astype(np.int64)


def digit_sizes(rng: np.random.Generator) -> Sizes:
    parts = power_law(np.arange(60_000) % 10, 1000, rng)
    return np.array([len(part) for part in parts])


def image_sizes(rng: np.random.Generator) -> Sizes:
    return np.full(500, 100)


models = fx.models
GENERATORS = {
    "mnist": Generator(digit_sizes, partial(models.logistic, 784, 10), (1, 28, 28), 10, 10),
    "femnist": Generator(writer_sizes, models.emnist_cnn, (1, 28, 28), 62, 20),
    "fed-cifar100": Generator(
        image_sizes, partial(models.resnet18, 100, stem="imagenet"), (3, 32, 32), 100, 20
    ),
    "shakespeare": Generator(role_sizes, models.char_lstm, (80,), 90, 4),
    "shakespeare-transformer": Generator(role_sizes, models.char_transformer, (80,), 90, 4),
}


def generated(name: str, rounds: int) -> Problem:
    """Return a problem on random data, for the clients of its cohorts alone."""
    make, rng = GENERATORS[name], np.random.default_rng(0)
    sizes = make.sizes(rng)
    cohorts, used = draw_cohorts(len(sizes), rounds)
    offsets = np.concatenate([[0], np.cumsum(sizes[used])])
    fields = make.fields(int(offsets[-1]), rng)
    return Problem(name, make.build, fields, offsets, cohorts, make.batch, make.text)


def real(name: str, rounds: int) -> Problem:
    """Return a problem on the real data of a task, for the clients of its cohorts alone."""
    text = name.startswith("shakespeare")
    model = {"model": "transformer"} if name == "shakespeare-transformer" else {}
    task = TASKS["shakespeare" if text else name](**model)
    train, batch = task.train, cast(int, task.local.batch_size)
    sizes = train.sizes
    cohorts, used = draw_cohorts(len(sizes), rounds)
    parts: list[Mapping[str, Tensor]] = [train.client(client) for client in used]
    if task.transform is not None:
        parts = [task.transform.evaluate(part) for part in parts]
    fields = {field: torch.cat([part[field] for part in parts]) for field in ("x", "y")}
    offsets = np.concatenate([[0], np.cumsum(sizes[used])])
    return Problem(name, GENERATORS[name].build, fields, offsets, cohorts, batch, text)


def draw_cohorts(clients: int, rounds: int) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Draw a cohort per round; return them as positions in the sorted list of all drawn clients."""
    rng = np.random.default_rng(1)
    drawn = [rng.choice(clients, COHORT, replace=False).tolist() for _ in range(rounds)]
    used = sorted(set(chain(*drawn)))
    return tuple(tuple(map(used.index, cohort)) for cohort in drawn), used


def ours(problem: Problem, device: str, precision: Precision, engine: Any) -> Rounds:
    """Return rounds of FedAvg by this package; the last round, which is evaluated, is left out."""
    records = fx.simulate(
        problem.task(),
        fx.fedavg(),
        len(problem.cohorts) + 1,
        lambda rng, round, federation: list(problem.cohorts[(round - 1) % len(problem.cohorts)]),
        engine=engine,
        device=device,
        precision=precision,
        evaluate_every=10**9,
    )
    return Rounds(records, device)


def sequential(problem: Problem, device: str, precision: Precision) -> Iterator[None]:
    """Train one client after another in plain PyTorch; yields after each round."""
    problem = problem.on(device)
    x, y, offsets = problem.fields["x"], problem.fields["y"], problem.offsets
    torch.manual_seed(0)
    model = problem.build().to(device).train()
    params = list(model.parameters())
    server = [p.detach().clone() for p in params]
    optimiser = torch.optim.SGD(params, lr=LR)  # without state: one serves all clients
    for cohort in problem.cohorts:
        total = [torch.zeros_like(p) for p in server]
        with arithmetic(precision):
            for client in cohort:
                torch._foreach_copy_([p.data for p in params], server)
                start, end = int(offsets[client]), int(offsets[client + 1])
                order = start + torch.randperm(end - start, device=device)
                for rows in order.split(problem.batch):
                    optimiser.zero_grad()
                    with autocast(device, precision):
                        outputs = model(x[rows])
                    problem.loss(outputs.float(), y[rows]).backward()
                    optimiser.step()
                torch._foreach_add_(total, [p.data for p in params])
        server = [value / len(cohort) for value in total]
        if device == "cuda":
            torch.cuda.synchronize()
        yield


def autocast(device: str, precision: Precision) -> AbstractContextManager[object]:
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device, torch.bfloat16)


def contestants(
    problem: Problem, device: str, precision: Precision, loop: bool
) -> dict[str, Callable[[], object]]:
    """Return an action per contestant that trains one round."""
    found: dict[str, Callable[[], object]] = {}
    found["fedexp, auto"] = ours(problem, device, precision, "auto")
    if loop:
        found["fedexp, loop"] = ours(problem, device, precision, "loop")
    found["sequential PyTorch"] = partial(next, sequential(problem, device, precision))
    if find_spec("pfl"):
        from standard_pfl import PflRounds

        kind = torch.bfloat16 if precision == "bf16" else None
        found["pfl"] = PflRounds(problem.on(device), device, kind)
    return found


def measure(
    problem: Problem, device: str, precision: Precision, turns: int, loop: bool
) -> list[Row]:
    """Return one row per contestant."""
    actions = contestants(problem, device, precision, loop)
    with redirect_stdout(sys.stderr):  # pfl prints the metrics of every round
        times = take_turns(actions, turns, WARM)
    rows = []
    for name, timing in times.items():
        action = actions[name]
        engine = action.engine if isinstance(action, Rounds) else ""
        own, _, requested = name.partition(", ")
        row = {"task": problem.name, "contestant": own, "engine": engine, "requested": requested}
        rows.append({**row, "precision": precision, **timing.row(), "all": list(timing.turns)})
    return rows


def table(problem: Problem, rows: list[Row]) -> str:
    """Return the table of a task, with ratios to this package, turn by turn."""
    first = Timing(tuple(rows[0]["all"]))
    cells = []
    for row in rows:
        timing = Timing(tuple(row["all"]))
        ratios = Timing(tuple(a / b for a, b in zip(timing.turns, first.turns, strict=True)))
        name = ", ".join(part for part in (row["contestant"], row["engine"]) if part)
        cells.append([name, row["precision"], str(timing), str(ratios)])
    steps = problem.steps()[WARM:]
    title = f"{problem.name}, {min(steps)}-{max(steps)} steps"
    return text_table([title, "precision", "ms per round", "x fedexp"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="the standard tasks, side by side")
    parser.add_argument("--task", choices=GENERATORS, action="append", help="default: all")
    parser.add_argument("--generated", action="store_true", help="random data of the real shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--precision", choices=("float32", "tf32", "bf16"), help="float32, or tf32 on a GPU"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help=f"rounds counted ({TURNS})")
    parser.add_argument("--loop", action="store_true", help="also time the loop of this package")
    parser.add_argument("--threads", type=int, help="of torch on a CPU; default: all cores")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    precision = args.precision or default_precision(torch.device(args.device))
    where, rows = hardware(args.device), list[Row]()
    print(f"{where}; {torch.get_num_threads()} thread(s); median over rounds (min-max)")
    if not find_spec("pfl"):
        print("pfl: skipped; pip install 'pfl[pytorch]==0.6.0'", file=sys.stderr)
    for name in args.task or list(GENERATORS):
        try:
            problem = (generated if args.generated else real)(name, WARM + args.turns)
        except UsageError as error:
            print(f"{name}: skipped; {error}; or use --generated", file=sys.stderr)
            continue
        found = measure(problem, args.device, precision, args.turns, args.loop)
        print(table(problem, found), flush=True)
        if name in PUBLISHED:
            own = PUBLISHED[name]
            flute, fedml = (own.milliseconds(time) for time in (own.flute, own.fedml))
            print(
                f"published, other hardware: FLUTE {flute:,.0f}, FedML {fedml:,.0f} ms per round\n"
            )
        rows += found
    print(f"published: {SOURCE}")
    published = {name: vars(value) for name, value in PUBLISHED.items()}
    more = {"generated": args.generated, "published": published, "published_source": SOURCE}
    write_record(args.out, where, rows, **more)


if __name__ == "__main__":
    main()
