"""The state of a simulation: all that a run needs to go on from a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.objective import Buffers
from fedexp.server import State as ServerState
from fedexp.tasks.task import Task


@dataclass(frozen=True, eq=False)
class SimulationState:
    """A snapshot after `round` rounds. Pass it as `start` to `simulate` to continue from it.

    Attributes:
        round: rounds done.
        steps: server steps taken; fewer than rounds where all clients of a round were dropped.
        params: the iterate that training continues from.
        buffers: its buffers.
        recent: the last iterates with their buffers, newest last, as many as the output averages.
        server: state of the server rule.
        shared: what the client rule keeps at the server (SCAFFOLD's c).
        clients: what it keeps at the clients that have taken part (SCAFFOLD's c_i).
    """

    round: int
    steps: int
    params: Tensor
    buffers: Buffers
    recent: tuple[tuple[Tensor, Buffers], ...]
    server: ServerState
    shared: Tensors
    clients: Mapping[int, Tensors]

    @classmethod
    def initial(cls, task: Task, algorithm: Algorithm, seed: int) -> SimulationState:
        return cls.of(*task.objective.initial(seed), algorithm)

    @classmethod
    def of(cls, params: Tensor, buffers: Buffers, algorithm: Algorithm) -> SimulationState:
        """The state before the first round of a model."""
        return cls(
            round=0,
            steps=0,
            params=params,
            buffers=buffers,
            recent=((params, buffers),),
            server=algorithm.server.init(params),
            shared=algorithm.client.init_shared(params),
            clients={},
        )

    def output(self) -> tuple[Tensor, Buffers]:
        """The model to evaluate and to keep: the mean of the recent iterates (sec. 5).

        It is computed beside the training, never fed back into it.
        """
        if len(self.recent) == 1:
            return self.recent[0]
        params = torch.stack([params for params, _ in self.recent]).mean(dim=0)
        averaged = torch.stack([buffers.averaged for _, buffers in self.recent]).mean(dim=0)
        return params, Buffers(averaged, self.buffers.kept)
