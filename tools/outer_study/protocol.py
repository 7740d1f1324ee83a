"""The protocol of docs/outer-optimisers.md as data; it was committed before its runs.

Workers train a small GPT (`tinygpt`, 113,370 parameters) with AdamW whose state they keep, warm-up
over a sixteenth of the steps and a cosine to zero over all of them, as in DiLoCo. Every run has
`STEPS` inner steps per worker, so that runs of as many workers see as many tokens, in `STEPS` / H
rounds. The runs are in bf16.

Questions, and what would answer them with yes:

1. Does FedExP, without tuning, gain over averaging (step 1)? In most cells its final test loss is
   lower, and in no cell higher by more than `MARGIN`.
2. Does it come near the best constant step, which takes a grid to find? In most cells its loss is
   within `MARGIN` of the best of the grid.
3. Does its step predict the best constant step? Over cells, the rank correlation between the
   geometric mean of the unclamped steps and the best constant step is at least 0.6. The best step
   is read off a parabola through the losses of the grid over the logarithm of the step.
4. Is it better than Nesterov with 0.7 and 0.9, the practice? As 1, against "nesterov".

The inner learning rate is that which is best for step 1 over `BASE`, of `LOCAL_LRS`. In the first
cell of `BASE` every rule is also run with each of them, so that a rule is seen with its own. The
server learning rate of FedAdam is that of `ADAM_LRS` which is best in that cell, over all of them.

Amendment, after 71 of the runs: the best inner learning rate for step 1 was the largest of three,
and a step above 1 may look good where the inner one is too small. Two larger ones are added.

Not in the study, for lack of time: models above 0.2 million parameters, more tokens, more than 64
inner steps per round, SGD as inner optimiser (and SCAFFOLD, which needs it), other momenta and
steps of Nesterov, more than 16 workers, and more than one seed outside `BASE`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple

import fedexp as fx
from fedexp.experiment import Experiment

Chunks = Literal["random", "contiguous"]

STEPS = 512  # inner steps per worker
WARMUP = STEPS // 16
BATCH, CONTEXT, LAYERS, CHARACTERS = 8, 32, 2, 300_000
EVALUATIONS = 4  # of a run, at equal numbers of inner steps
LOCAL_LRS = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SEEDS = (0, 1, 2)  # in `BASE`; the first one elsewhere
MARGIN = 0.01  # nats per character
CONSTANTS = (0.5, 0.7, 1.0, 1.4, 2.0)
ADAM_LRS = (0.003, 0.01, 0.03)

# Rules by name. The mean of the last two iterates is FedExP's output; here every rule returns its
# last iterate, so that only steps differ.
RULES: dict[str, Callable[[], fx.Algorithm]] = {
    **{f"step {c:g}": lambda c=c: fx.fedavg(c) for c in CONSTANTS},  # type: ignore[misc]
    "nesterov": fx.diloco,
    "fedexp": fx.fedexp,
    "fedexp unclamped": lambda: fx.fedexp(clamp=False),
    "fedexp factor 1": lambda: fx.fedexp(factor=1.0),
    **{f"fedadam {lr:g}": lambda lr=lr: fx.fedadam(lr) for lr in ADAM_LRS},  # type: ignore[misc]
}


class Cell(NamedTuple):
    """A federation of workers."""

    workers: int
    inner_steps: int
    chunks: Chunks


CHUNKS: tuple[Chunks, ...] = ("random", "contiguous")
BASE = tuple(Cell(8, 32, chunks) for chunks in CHUNKS)
CELLS = (
    *BASE,
    *(Cell(8, steps, chunks) for steps, chunks in product((8, 64), CHUNKS)),
    *(Cell(workers, 32, chunks) for workers, chunks in product((2, 4, 16), CHUNKS)),
)


@dataclass(frozen=True)
class Key:
    """One run."""

    cell: Cell
    rule: str
    local_lr: float
    seed: int

    def experiment(self) -> Experiment:
        """Return the run."""
        cell, every = self.cell, STEPS // EVALUATIONS // self.cell.inner_steps
        options = {
            "task.workers": cell.workers,
            "task.chunks": cell.chunks,
            "task.context": CONTEXT,
            "task.layers": LAYERS,
            "task.characters": CHARACTERS,
            "average_last": 1,
        }
        return Experiment(
            "tinygpt",
            RULES[self.rule](),
            self.seed,
            STEPS // cell.inner_steps,
            "all",
            fx.diloco_local(self.local_lr, cell.inner_steps, WARMUP, batch_size=BATCH),
            options=options,
            evaluate_every=every,
            engine="batched",
            precision="bf16",
        )


def tuning() -> Iterator[Key]:
    """Yield the runs that choose learning rates, and show each rule with its own."""
    for rule, lr in product(RULES, LOCAL_LRS):
        yield Key(BASE[0], rule, lr, SEEDS[0])
    for cell, lr in product(BASE[1:], LOCAL_LRS):
        yield Key(cell, "step 1", lr, SEEDS[0])


def judged(rules: Sequence[str], local_lr: float) -> Iterator[Key]:
    """Yield the runs of the chosen rules with the chosen inner learning rate."""
    for cell, rule in product(CELLS, rules):
        yield Key(cell, rule, local_lr, SEEDS[0])
    for cell, rule, seed in product(BASE, rules, SEEDS[1:]):
        yield Key(cell, rule, local_lr, seed)
