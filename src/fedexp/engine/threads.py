"""The threads engine: the loop with its clients distributed over threads.

Each client is trained as in the loop, by one thread on a copy of the model, so its numbers do not
depend on how many threads there are. Threads that share an operation wait for each other many times
in a step; these do not, and a client's model stays in the cache of a core. It pays for large models
on a CPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial, reduce
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fedexp.data.federation import Batch
from fedexp.engine.base import Pool, Sums, Trained, add_sums, cohort_parts, sum_trained
from fedexp.engine.loop import train
from fedexp.engine.plan import Work
from fedexp.engine.state import SimulationState
from fedexp.errors import EngineError
from fedexp.objective import CopyableObjective
from fedexp.seeding import seeded_torch, torch_seed

LEVELS = 2**16  # an element takes 16 of the 64 bits of a draw


class Threads:
    """Trains one client per thread, on as many threads as torch would use for one operation.

    Args:
        objective: the local loss; every thread has a copy of it.
    """

    name = "threads"

    def __init__(self, objective: CopyableObjective) -> None:
        self._pool = Pool()
        self._copies: SimpleQueue[ThreadCopy] = SimpleQueue()
        for _ in range(self._pool.count):
            self._copies.put(ThreadCopy(objective))

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        sizes = work.task.train.sizes
        begun: deque[tuple[list[int], Tensor]] = deque()  # clients, and a matrix of their updates
        free: list[Tensor] = []  # matrices to use again: new memory costs a page fault per 4 KiB

        def parts() -> Iterator[list[tuple[int, Tensor]]]:
            for clients in cohort_parts(work, state, least=self._pool.count):
                matrix = free.pop() if free else None
                if matrix is None or len(matrix) < len(clients):
                    matrix = state.params.new_empty(len(clients), len(state.params))
                deltas = matrix[: len(clients)]
                begun.append((clients, deltas))
                rows = zip(clients, deltas, strict=True)
                yield sorted(rows, key=lambda row: -sizes[row[0]])  # the longest first

        def sums() -> Iterator[Sums]:
            for results in self._pool.map_parts(partial(self._train, work, state), parts()):
                (clients, deltas), trained = begun.popleft(), dict(results)
                part = sum_trained(work, clients, [trained[client] for client in clients], deltas)
                if not part[1]:  # client states may be views of an update
                    free.append(deltas)
                yield part

        return reduce(add_sums, sums())

    def _train(
        self, work: Work, state: SimulationState, row: tuple[int, Tensor]
    ) -> tuple[int, Trained]:
        """Train a client, whose update is written to its row of a matrix."""
        client, out = row
        copy = self._copies.get()
        try:
            copy.seed(torch_seed(work.seed, "layers", work.round, client))
            return client, train(work, state, client, copy.objective, out=out)
        finally:
            self._copies.put(copy)


class ThreadCopy:
    """A copy of an objective for one thread at a time, with separate generators for dropout."""

    def __init__(self, objective: CopyableObjective) -> None:
        self.objective = objective.copy()
        self.dropouts = replace_dropouts(self.objective.module)
        for layer in self.objective.module.modules():
            if isinstance(layer, nn.MaxPool2d | SeededDropout):
                layer.register_forward_hook(keep_channels_last)
        drawing = [type(m).__name__ for m in self.objective.module.modules() if _draws(m)]
        if drawing:
            raise EngineError(
                f"{drawing[0]} draws random numbers from torch's global generator, so threads "
                "would disturb each other"
            )

    def seed(self, derived: int) -> None:
        """Seed all generators."""
        for k, layer in enumerate(self.dropouts):
            layer.generator.manual_seed(derived + k)


class SeededDropout(nn.Dropout):
    """`nn.Dropout` with a separate generator; p is exact to 1 / 65,536.

    One draw serves four elements, because torch's own dropout takes as long as a convolution.
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
        # floating-point output: converting booleans would take as long as all the rest
        torch.ge(levels, round(self.p * LEVELS) - LEVELS // 2, out=scale)
        return input * scale.mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


def keep_channels_last(layer: nn.Module, inputs: Any, output: Tensor) -> None:
    """Forward hook: let the gradient of an output with channels last have that layout, too.

    Behind `nn.Flatten` it has another one, in which the backward pass of max-pooling takes ten
    times as long. No number changes.
    """
    last = output.ndim == 4 and output.is_contiguous(memory_format=torch.channels_last)
    if last and output.requires_grad and not output.is_contiguous():
        output.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))


def replace_dropouts(module: nn.Module) -> list[SeededDropout]:
    """Replace every plain dropout in the module, and return the replacements."""
    replacements: dict[int, SeededDropout] = {}
    for parent in module.modules():
        for name, child in parent._modules.items():
            if type(child) is nn.Dropout:
                layer = replacements.setdefault(id(child), SeededDropout(child.p))
                parent._modules[name] = layer
    return list(replacements.values())


def _draws(layer: nn.Module) -> bool:
    """Return whether a layer draws a dropout mask from torch's global generator."""
    if isinstance(layer, SeededDropout):
        return False
    if isinstance(layer, _DropoutNd):
        return layer.p > 0
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


def check_draws(objective: CopyableObjective, state: SimulationState, batch: Batch) -> None:
    """Raise `EngineError` where forward draws from torch's global generator, with dropout on."""
    copy = ThreadCopy(objective)
    with seeded_torch(0, "trial"):
        before = torch.get_rng_state()
        copy.objective.gradient(state.params.clone(), state.buffers, batch)
        if not torch.equal(before, torch.get_rng_state()):
            raise EngineError(
                "forward draws random numbers outside nn.Dropout layers, so threads would disturb "
                "each other"
            )
