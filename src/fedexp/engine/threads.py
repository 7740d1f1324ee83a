"""Threads that share out work, each of them alone on a core.

The loop with its clients shared out among threads: what suits large models on a CPU.

Each client is trained as in the loop, by one thread on a copy of the model, so its numbers do not
depend on how many threads there are. Threads that share an operation wait for each other many times
in a step; these do not, and a client's model stays in the cache of a core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedexp.data.federation import Batch
from fedexp.engine.loop import Sums, Trained, sum_in_parts, sum_trained, train
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.errors import EngineError
from fedexp.objective import ModuleObjective
from fedexp.seeding import seeded_torch, torch_seed

T = TypeVar("T")
R = TypeVar("R")


class Pool:
    """As many threads as torch would use for one operation; operations in them use one each."""

    def __init__(self) -> None:
        self.count = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(1,)
        )

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The results for all items, in their order; one thread is the caller's own."""
        if self.count == 1:
            return [function(item) for item in items]
        before = torch.get_num_threads()
        # libraries keep one number for all threads, which the last to set it has chosen
        torch.set_num_threads(1)
        try:
            return list(self._threads.map(function, items))
        finally:
            torch.set_num_threads(before)


SMALL_MODEL = 100_000  # parameters; below, python itself takes most of the time, and one at a time
LEVELS = 2**16  # a decision takes 16 of the 64 bits of a draw, so a draw serves four


def threads_pay(work: Work, state: SimulationState) -> bool:
    """Return whether clients gain by threads: a large model on a CPU with several cores."""
    return (
        isinstance(work.task.objective, ModuleObjective)
        and state.params.device.type == "cpu"
        and state.params.numel() >= SMALL_MODEL
        and min(torch.get_num_threads(), len(work.cohort)) > 1
    )


class Threads:
    """The engine; as many threads as torch would use for one operation.

    Args:
        objective: what clients minimise; every thread has a copy of it.
    """

    name = "threads"

    def __init__(self, objective: ModuleObjective) -> None:
        self._pool = Pool()
        self._copies: SimpleQueue[ThreadCopy] = SimpleQueue()
        for _ in range(self._pool.count):
            self._copies.put(ThreadCopy(objective))

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        return sum_in_parts(work, state, self.run_clients, least=self._pool.count)

    def run_clients(self, work: Work, state: SimulationState, clients: list[int]) -> Sums:
        """Train some clients, as many at a time as there are threads."""
        trained = self._pool.map(partial(self._train, work, state), clients)
        return sum_trained(work, clients, trained)

    def _train(self, work: Work, state: SimulationState, client: int) -> Trained:
        copy = self._copies.get()
        try:
            copy.seed(torch_seed(work.seed, "layers", work.round, client))
            return train(work, state, client, copy.objective)
        finally:
            self._copies.put(copy)


class ThreadCopy:
    """An objective that shares nothing with others; one thread at a time may use it."""

    def __init__(self, objective: ModuleObjective) -> None:
        self.objective = objective.copy()
        self.dropouts = own_dropouts(self.objective.module)
        others = [type(m).__name__ for m in self.objective.module.modules() if _draws(m)]
        if others:
            raise EngineError(
                f"{others[0]} draws random numbers from torch's one generator, so threads would "
                "disturb each other"
            )

    def seed(self, derived: int) -> None:
        """Let all draws follow from a seed."""
        for k, layer in enumerate(self.dropouts):
            layer.generator.manual_seed(derived + k)


class OwnDropout(nn.Dropout):
    """`nn.Dropout` with a generator of its own; p is exact to 1 / 65,536.

    It draws a quarter as often: torch's own takes as long as a convolution.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator()

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        if torch._C._current_graph_task_id() != -1:
            raise EngineError("dropout is computed again in the backward pass (checkpoint)")
        count = input.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64)
        draws.random_(-(2**63), None, generator=self.generator)
        # in the order in which the input is stored, channels last or not
        scale = torch.empty_like(input)
        levels = draws.view(torch.int16)[:count].as_strided(input.shape, scale.stride())
        # numbers at once: turning truth values into them takes as long as all the rest
        torch.ge(levels, round(self.p * LEVELS) - LEVELS // 2, out=scale)
        return input * scale.mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


def own_dropouts(module: nn.Module) -> list[OwnDropout]:
    """Replace every plain dropout in the module, and return those in their place."""
    found: dict[int, OwnDropout] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.Dropout:
                parent._modules[name] = found.setdefault(id(child), OwnDropout(child.p))
    return list(found.values())


def _draws(layer: nn.Module) -> bool:
    """Return whether a layer drops something with torch's own generator."""
    if isinstance(layer, OwnDropout):
        return False
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def check_draws(objective: ModuleObjective, state: SimulationState, batch: Batch) -> None:
    """Raise `EngineError` where forward draws from torch's own generator, with dropout on."""
    copy = ThreadCopy(objective)
    with seeded_torch(0, "trial"):
        before = torch.get_rng_state()
        copy.objective.gradient(state.params.clone(), state.buffers, batch)
        if not torch.equal(before, torch.get_rng_state()):
            raise EngineError(
                "forward draws random numbers outside nn.Dropout layers, so threads would disturb "
                "each other"
            )
