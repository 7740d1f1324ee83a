"""A whole training run on a GPU, start-up and compilation included.

ResNet-18 with GroupNorm, 100 clients of CIFAR-10's shape with Dirichlet(0.3) labels, 20 per round,
20 steps of batches of 50, FedExP; the test set and all training data are evaluated every ten
rounds. The images are generated: their values do not matter for time. Prints the seconds since the
start at some rounds; one run is one turn, so repeat it for the spread.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()  # before torch is imported, which is part of start-up

import argparse  # noqa: E402
from functools import partial  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

import fedexp as fx  # noqa: E402
from fedexp.data import Federation, Images, partition  # noqa: E402
from fedexp.tasks.recipe import PAPER_TRAINING  # noqa: E402
from machine import hardware, write_record  # noqa: E402


def images(count: int, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    x = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)
    return {"x": torch.from_numpy(x), "y": torch.from_numpy(rng.integers(0, 10, count))}


def task(clients: int, count: int, tests: int) -> fx.tasks.Task:
    rng = np.random.default_rng(0)
    pool = images(count, rng)
    parts = partition.dirichlet(pool["y"].numpy(), clients, 0.3, rng)
    return fx.tasks.classification(
        "cifar10-shaped",
        partial(fx.models.resnet18, 10),
        Federation.from_parts(pool, parts),
        test=images(tests, rng),
        transform=Images((0.5,) * 3, (0.25,) * 3),
        local=PAPER_TRAINING,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tiny", action="store_true", help="few clients and images, for a dry run")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = task(4, 60, 20) if args.tiny else task(100, 50_000, 10_000)
    cohort = 2 if args.tiny else 20
    records = fx.simulate(
        work, fx.fedexp(), args.rounds, cohort, evaluate_every=10,
        device=args.device, precision=args.precision,
    )  # fmt: skip
    where, rows = hardware(args.device), []
    print(f"{where}, {args.precision}")
    for record in records:
        if record.round in (1, 2, args.rounds) or record.round % 50 == 0:
            taken = round(time.perf_counter() - BEGAN, 2)
            rows.append({"round": record.round, "engine": record.engine, "seconds": taken})
            print(f"round {record.round:4d}, {record.engine}: {taken:7.2f} s", flush=True)
            write_record(args.out, where, rows, rounds=args.rounds, precision=args.precision)


if __name__ == "__main__":
    main()
