"""Local SGD of a character model with FedExP as the outer optimizer, in plain torch.distributed.

Four processes train on a quarter of a text each, 10 steps at a time. After them one all-reduce
averages their updates and squared norms, and every process takes the same outer step:

    torchrun --nproc-per-node 4 examples/outer/local_sgd.py
    torchrun --nproc-per-node 4 examples/outer/local_sgd.py --rule average

With `average` it is local SGD: the workers' models are averaged.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fedexp as fx
from fedexp.outer import OuterOptimizer

TEXT = """Four score and seven years ago our fathers brought forth on this continent, a new
nation, conceived in Liberty, and dedicated to the proposition that all men are created equal.
Now we are engaged in a great civil war, testing whether that nation, or any nation so
conceived and so dedicated, can long endure. We are met on a great battle-field of that war. We
have come to dedicate a portion of that field, as a final resting place for those who here gave
their lives that that nation might live. It is altogether fitting and proper that we should do
this. But, in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this
ground. The brave men, living and dead, who struggled here, have consecrated it, far above our
poor power to add or detract. The world will little note, nor long remember what we say here,
but it can never forget what they did here. It is for us the living, rather, to be dedicated
here to the unfinished work which they who fought here have thus far so nobly advanced. It is
rather for us to be here dedicated to the great task remaining before us, that from these
honored dead we take increased devotion to that cause for which they gave the last full measure
of devotion, that we here highly resolve that these dead shall not have died in vain, that this
nation, under God, shall have a new birth of freedom, and that government of the people, by the
people, for the people, shall not perish from the earth."""  # Lincoln, 1863
ALPHABET = sorted(set(TEXT))
CONTEXT, LR, BATCH = 8, 0.5, 16  # characters that a prediction sees; inner step size
RULES: dict[str, fx.ServerRule] = {
    "fedexp": fx.ExP(eps=0.05, eps_mode="relative"),
    "average": fx.Average(),
    "momentum": fx.Momentum(lr=0.7, beta=0.6),
}


def build_model() -> nn.Module:
    """Return a network that predicts the next character; equal on all workers."""
    torch.manual_seed(0)
    embedding = nn.Embedding(len(ALPHABET), 8)
    hidden, out = nn.Linear(8 * CONTEXT, 64), nn.Linear(64, len(ALPHABET))
    return nn.Sequential(embedding, nn.Flatten(), hidden, nn.Tanh(), out)


def part_of(worker: int, workers: int) -> Tensor:
    """Return the windows of a worker's part of the text, [n, CONTEXT + 1], the last one to predict.

    The parts are in a row: a worker has some words more often than the others.
    """
    codes = torch.tensor([ALPHABET.index(character) for character in TEXT])
    return codes.unfold(0, CONTEXT + 1, 1).tensor_split(workers)[worker]


def mean_loss(model: nn.Module, windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]), windows[:, -1])


def local_steps(model: nn.Module, windows: Tensor, steps: int, draws: torch.Generator) -> None:
    """Train on a worker's windows; `draws` draws its batches."""
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(steps):
        rows = torch.randint(len(windows), (BATCH,), generator=draws)
        inner.zero_grad()
        mean_loss(model, windows[rows]).backward()
        inner.step()


def main() -> None:
    """Train on all processes; the first prints a line per round."""
    parser = argparse.ArgumentParser(description="Local SGD with a server rule.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="inner steps per round")
    parser.add_argument("--rule", choices=RULES, default="fedexp")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--save", help="file for the weights of the output model")
    options = parser.parse_args()
    if options.double:
        torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    worker, workers = dist.get_rank(), dist.get_world_size()

    model, draws = build_model(), torch.Generator().manual_seed(worker)
    windows, whole = part_of(worker, workers), part_of(0, 1)
    outer = OuterOptimizer(model.parameters(), RULES[options.rule])
    for round in range(1, options.rounds + 1):
        start = [param.detach().clone() for param in model.parameters()]
        local_steps(model, windows, options.steps, draws)
        outer.set_pseudo_gradients(start)
        outer.all_reduce()
        outer.step()
        if worker == 0:
            with torch.no_grad(), outer.averaged_parameters():
                loss = mean_loss(model, whole).item()
            values = " ".join(f"{name} {value:.3g}" for name, value in outer.metrics.items())
            print(f"round {round} loss {loss:.4f} {values}", flush=True)

    with outer.averaged_parameters():
        if worker == 0 and options.save:
            torch.save(model.state_dict(), options.save)
    dist.barrier()
    os._exit(0)  # Gloo's threads may abort the interpreter's shutdown (seen with torch 2.13)


if __name__ == "__main__":
    main()
