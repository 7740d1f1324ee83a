"""The batched engine: all clients of a cohort advance together, step by step.

It computes what the loop computes: the same clients, batches and augmentation, the same rules.
Clients with shorter batches are padded with rows that count nothing, or grouped by the length of
their batches where examples of a batch depend on each other. Only what layers draw themselves
(dropout) differs: it follows from the seed and the cohort, not from the client.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.client import Tensors
from fedexp.engine.client_store import ClientStates
from fedexp.engine.cuda_graph import (
    Captured,
    Finished,
    LocalProgram,
    Program,
    WholeRound,
    finished,
    packed,
    signature,
    unstacked,
)
from fedexp.engine.plan import CohortPlan, Work, batch_key, plan_cohort
from fedexp.engine.state import SimulationState
from fedexp.errors import EngineWarning
from fedexp.objective import BatchedObjective, buffer_changes
from fedexp.seeding import seeded_torch

COHORT_BYTES = {"cpu": 2**25, "cuda": 2**34}  # models side by side; one, where one is larger


Implementation = Literal["layers", "vmap"]


class Batched:
    """The engine; it remembers the CUDA graphs of one run.

    Args:
        implementation: "layers" where all layers of the model have a stacked form and the client
            rule is linear; "vmap" asks the objective for the gradients of all clients.
        padded: fill up short batches; False groups clients by the length of their batches.
        graphs: replay a round as one CUDA graph; None for yes on a GPU.
        fuse: let `torch.compile` merge the arithmetic of updates; None for yes on a GPU.
    """

    def __init__(
        self,
        implementation: Implementation = "vmap",
        padded: bool = True,
        graphs: bool | None = None,
        fuse: bool | None = None,
    ) -> None:
        self.implementation, self.padded = implementation, padded
        self.graphs, self.fuse = graphs, fuse
        self._captured: dict[Any, Program] = {}
        self._in_parts = False
        self._ahead: dict[tuple[int, ...], CohortPlan] = {}

    @property
    def name(self) -> str:
        return f"batched ({self.implementation}{'' if self.padded else ', not padded'})"

    def __call__(self, work: Work, state: SimulationState) -> tuple[Aggregate, dict[int, Tensors]]:
        """Train the cohort, as many clients at a time as fit; return sums and new client states.

        Where the memory of a device runs out, half as many are tried.
        """
        params = state.params
        total = Aggregate.zero(params.numel(), params.dtype, params.device)
        changed: dict[int, Tensors] = {}
        together = _together(work, state)
        waiting = [int(client) for client in work.cohort]
        while waiting:
            try:
                part, states = self.run_clients(work, state, waiting[:together])
            except torch.OutOfMemoryError:
                if min(together, len(waiting)) == 1:
                    raise
                together = max(1, min(together, len(waiting)) // 2)
                continue
            total, waiting = total + part, waiting[together:]
            changed |= states
        return total, changed

    def whole_round(self, work: Work, state: SimulationState) -> Finished | None:
        """The round as one CUDA graph, the server's step included; None where that cannot be."""
        clients = [int(client) for client in work.cohort]
        if self._in_parts or not self._replays(state) or len(clients) > _together(work, state):
            return None
        plan, client_state = self._planned(work, clients), _mine(work, state, clients)
        weights = [work.weight(client) for client in clients]
        key = batch_key(work.seed, work.round)
        inputs = {
            **_inputs(work, state, plan, client_state),
            **{f"server.{name}": value for name, value in state.server.items()},
            "packed": _on(state.params.device, packed(key, work.lr, plan.who, plan.steps, weights)),
        }
        local = self._local_program(work, plan, inputs)
        if not local.is_static:
            return None
        whole = WholeRound(local, work.algorithm, work.total_weight)
        with seeded_torch(work.seed, "layers", work.round, clients[0]):
            outputs = self._replayed(("whole", *local.sizes), whole, inputs)
        if outputs is None:
            return None
        self._plan_ahead(work)
        return finished(outputs, state, work.algorithm, clients)

    def run_clients(
        self, work: Work, state: SimulationState, clients: Sequence[int]
    ) -> tuple[Aggregate, dict[int, Tensors]]:
        """Train some clients as one program."""
        rule, client_state = work.algorithm.client, _mine(work, state, clients)
        plan = self._planned(work, clients)
        device = state.params.device
        inputs = {
            **_inputs(work, state, plan, client_state),
            "key": torch.full((), batch_key(work.seed, work.round), device=device),
            "who": _on(device, plan.who),
            "lr": torch.full((), work.lr, dtype=torch.float64, device=device),
        }
        with seeded_torch(work.seed, "layers", work.round, clients[0]):
            program = self._local_program(work, plan, inputs)
            replays = program.is_static and self._replays(state)
            outputs = self._replayed(program.sizes, program, inputs) if replays else None
            outputs = program(inputs) if outputs is None else outputs
        if state.params.is_cuda and len(clients) == len(work.cohort):
            self._plan_ahead(work)
        deltas = state.params - outputs["params"]
        total_lr = _on(state.params.device, plan.steps * work.lr)[:, None].to(deltas.dtype)
        kept, extras = rule.end_round(deltas, total_lr, state.broadcast, client_state)
        if outputs["averaged"].numel():
            changes = buffer_changes(outputs["averaged"], state.buffers.averaged)
            extras = {**extras, "buffers": changes}
        weights = [work.weight(c) for c in clients] if work.weighting == "size" else None
        changed = unstacked(kept, clients, usable(deltas, extras)) if kept else {}
        return Aggregate.of(deltas, weights, extras), changed

    def _plan_ahead(self, work: Work) -> None:
        """Plan the next round while the device computes this one; unused if it comes otherwise."""
        after = work.after()
        clients = [int(client) for client in after.cohort]
        if clients:
            self._ahead = {(after.round, *clients): plan_cohort(after, clients)}
            work.task.train.prefetch(clients)

    def _planned(self, work: Work, clients: Sequence[int]) -> CohortPlan:
        return self._ahead.pop((work.round, *clients), None) or plan_cohort(work, clients)

    def _replays(self, state: SimulationState) -> bool:
        return state.params.is_cuda and self.graphs is not False

    def _replayed(self, kind: tuple[Any, ...], program: Program, inputs: Tensors) -> Tensors | None:
        """Run a program by its CUDA graph, captured at the first time; None where that fails.

        A rule or a model that looks at its numbers on the host cannot be captured, and a whole
        round may be too large: then local training alone is tried, and without a graph at last.
        """
        key = (*kind, signature(inputs))
        try:
            if key not in self._captured:
                self._captured[key] = self._capture(program, inputs)
            return self._captured[key](inputs)
        except RuntimeError as error:
            self._captured.clear()
            whole = isinstance(program, WholeRound)
            if isinstance(error, torch.OutOfMemoryError):
                if not whole:
                    raise
            else:
                what = "rounds are" if whole else "local training is"
                warnings.warn(f"{what} not captured: {error}", EngineWarning, stacklevel=2)
            self._in_parts = True
            self.graphs = self.graphs if whole else False
            return None

    def _capture(self, program: Program, inputs: Tensors) -> Program:
        return Captured(program, inputs)

    def _local_program(self, work: Work, plan: CohortPlan, inputs: Tensors) -> LocalProgram:
        objective, lengths = cast(BatchedObjective, work.task.objective), plan.lengths
        short = not self.padded and bool((lengths != plan.width).any())
        on_gpu = inputs["params"].is_cuda
        return LocalProgram(
            objective,
            work.algorithm.client,
            work.local,
            work.task.transform,
            work.task.train.fields,
            steps=len(lengths),
            width=plan.width,
            reach=plan.reach,
            all_active=bool(lengths.all()),
            lengths=lengths if short else None,
            fuse=on_gpu if self.fuse is None else self.fuse,
            layered=self.implementation == "layers",
        )


def _together(work: Work, state: SimulationState) -> int:
    """Clients whose models and batches fit the memory that is meant for them."""
    params = state.params
    budget = COHORT_BYTES.get(params.device.type, 2**30)
    return max(1, budget // (params.numel() * params.element_size() + _batch_bytes(work)))


def _batch_bytes(work: Work) -> int:
    """The bytes of a client's largest batch as it is stored."""
    fields, sizes = work.task.train.fields.values(), work.task.train.sizes[work.cohort]
    rows = min(work.local.batch_size or int(sizes.max()), int(sizes.max()))
    return rows * sum(value[0].numel() * value.element_size() for value in fields)


def _inputs(
    work: Work, state: SimulationState, plan: CohortPlan, client_state: Tensors
) -> dict[str, Tensor]:
    """The large inputs of a local program, on the device of the model."""
    device, rows = state.params.device, work.task.train.cohort_rows(plan.who[0].tolist())
    inputs = {
        "params": state.params,
        "averaged": state.buffers.averaged,
        "kept": state.buffers.kept,
        **{f"broadcast.{name}": value for name, value in state.broadcast.items()},
        **{f"client_state.{name}": value for name, value in client_state.items()},
        **{f"data.{name}": value for name, value in rows.items()},
    }
    return inputs if plan.draws is None else {**inputs, "draws": _on(device, plan.draws)}


def _on(device: torch.device, array: np.ndarray[Any, Any]) -> Tensor:
    """A host array on the device, without waiting for it where the device has its own memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _mine(work: Work, state: SimulationState, clients: Sequence[int]) -> dict[str, Tensor]:
    """What the clients have kept for their rule, or begin with."""
    fresh = work.algorithm.client.init_client_state(state.params)
    return ClientStates.of(state.clients).stacked(clients, fresh)
