"""The batched engine: all clients of a cohort are trained together, step by step.

It computes what the loop computes: the same clients, batches and augmentation, the same rules.
Clients with shorter batches are padded with examples of weight 0, or grouped by the length of their
batches where examples of a batch depend on each other. Only the draws of layers (dropout) differ:
they follow from the seed and the cohort, not from the client.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.client import Tensors
from fedexp.data.federation import Federation
from fedexp.data.streaming import StreamedFederation
from fedexp.engine.base import RoundResult, Sums, stacked_states, sum_updates
from fedexp.engine.cuda_graph import (
    CudaGraphRound,
    Program,
    capture_graph,
    pack_inputs,
    round_result,
    signature,
)
from fedexp.engine.local_steps import LocalProgram, part
from fedexp.engine.plan import (
    CohortPlan,
    Numbers,
    Work,
    batch_key,
    client_steps,
    host_rows,
    plan_cohort,
)
from fedexp.engine.state import SimulationState
from fedexp.errors import EngineWarning
from fedexp.local import KEPT, kept_state, split_client_state
from fedexp.objective import BatchedObjective
from fedexp.seeding import preserved_draws, seeded_torch

COHORT_BYTES = {"cpu": 2**25, "cuda": 2**34}  # models trained together; one, where one is larger
STEPPED_MODEL = 2**22  # parameters of a model whose steps are captured one by one
STEPPED_EXAMPLES = 2**24  # of a round, for which a plan of such steps has room at most
MOST_GRAPHS = 32  # captured for cohorts of different sizes; further ones run without a graph

Implementation = Literal["layers", "vmap"]
Capture = Callable[[Program, Tensors, Program | None], Program]


class Batched:
    """Trains the clients of a cohort together; holds the CUDA graphs of their programs.

    Runs may share an engine, one after another, if their programs have the same constants
    (`SharedPrograms`); each calls `begin_run`.

    Args:
        implementation: "layers" where all layers of the model have a stacked implementation and the
            client rule is linear; "vmap" asks the objective for the gradients of all clients.
        padded: pad short batches; False groups clients by the length of their batches.
        graphs: replay CUDA graphs; None for yes on a GPU.
        capture: captures a program, after a call of what warms it up; returns what replays it.
    """

    def __init__(
        self,
        implementation: Implementation = "vmap",
        padded: bool = True,
        graphs: bool | None = None,
        capture: Capture = capture_graph,
    ) -> None:
        self.implementation, self.padded = implementation, padded
        self.graphs, self.capture = graphs, capture
        self.cuda_graph: Literal["round", "local training"] | None = None  # replayed last
        self._captured: dict[Any, Program] = {}
        self.begin_run()

    def begin_run(self) -> None:
        """Restart the decisions that a run takes as it meets cohorts; captured graphs stay."""
        self._captures_rounds = self._captures_training = True
        self._met: set[Any] = set()  # programs that this run asked for
        self._next_plan: tuple[Work, CohortPlan, bool] | None = None
        self._sizes: tuple[Federation, Numbers] | None = None  # the smallest and largest client's
        self.cuda_graph = None

    def release(self) -> bool:
        """Drop all captured graphs; return whether there were any."""
        had_any = bool(self._captured)
        self._captured.clear()
        return had_any

    @property
    def variant(self) -> str:
        """The implementation, and whether batches are padded."""
        return self.implementation + ("" if self.padded else ", not padded")

    @property
    def name(self) -> str:
        return f"batched ({self.variant})"

    def __call__(self, work: Work, state: SimulationState) -> Sums:
        """Train the cohort, as many clients at a time as fit; return sums and new client states.

        Where the memory of a device runs out, half as many are tried.
        """
        params = state.params
        total = Aggregate.zero(params.numel(), params.dtype, params.device)
        changed: dict[int, Tensors] = {}
        together = _clients_at_a_time(work, state)
        remaining: list[int] = work.cohort.tolist()
        while remaining:
            try:
                part, states = self.run_clients(work, state, remaining[:together])
            except torch.OutOfMemoryError:
                if min(together, len(remaining)) == 1:
                    raise
                together = max(1, min(together, len(remaining)) // 2)
                continue
            total, remaining = total + part, remaining[together:]
            changed |= states
        return total, changed

    def run_round(self, work: Work, state: SimulationState) -> RoundResult | None:
        """Run the round as one CUDA graph, server step included; None where that is impossible."""
        clients: list[int] = work.cohort.tolist()
        fits = len(clients) <= _clients_at_a_time(work, state)
        is_plain = not (work.algorithm.client.needs_loss or work.local.keep_state)
        captures = self._captures_rounds and is_plain
        if not (fits and captures and self._replays(state)):
            return None
        is_stepped = self._is_stepped(work, state)
        plan = self._plan(work, clients, is_stepped)
        weights = [work.weight(client) for client in clients]
        small = pack_inputs(batch_key(work.seed, work.round), work.lr, plan, weights)
        inputs = {
            **_inputs(work, state, plan, stacked_states(work, state, clients)),
            **{f"server.{name}": value for name, value in state.server.items()},
            "small": _to_device(small, state.params.device),
            **({"steps": torch.tensor(plan.steps.max())} if is_stepped else {}),
        }
        local = self._local_program(work, plan, state)
        if not local.is_static:
            return None
        program = CudaGraphRound(local, work.algorithm, work.total_weight)
        with seeded_torch(work.seed, "layers", work.round, clients[0]):
            outputs = self._replay(("round", *local.sizes), program, inputs)
        if outputs is None:
            return None
        self._plan_ahead(work, is_stepped)
        self.cuda_graph = "round"
        return round_result(outputs, state, work.algorithm, clients)

    def run_clients(self, work: Work, state: SimulationState, clients: Sequence[int]) -> Sums:
        """Train some clients as one program."""
        is_stepped = self._replays(state) and self._is_stepped(work, state)
        plan = self._plan(work, clients, is_stepped)
        client_state, moments = split_client_state(stacked_states(work, state, clients))
        device, key = state.params.device, batch_key(work.seed, work.round)
        inputs = {
            **_inputs(work, state, plan, client_state),
            **kept_state(moments),
            "table": _to_device(plan.table, device),
            "lr": torch.full((), work.lr, dtype=torch.float64, device=device),
            **({"steps": torch.tensor(plan.steps.max())} if is_stepped else {}),
        }
        if device.type == "cpu":
            sizes = (len(plan.lengths), plan.width)
            rows = host_rows(key, plan.who, *sizes, work.local.batch_size)
            inputs["rows"] = torch.from_numpy(rows)
        else:
            inputs["key"] = torch.full((), key, device=device)
        with seeded_torch(work.seed, "layers", work.round, clients[0]):
            program = self._local_program(work, plan, state)
            replays = program.is_static and self._replays(state)
            outputs = self._replay(program.sizes, program, inputs) if replays else None
            self.cuda_graph = None if outputs is None else "local training"
            outputs = program(inputs) if outputs is None else outputs
        if state.params.is_cuda and len(clients) == len(work.cohort):
            self._plan_ahead(work, is_stepped)
        deltas = outputs["deltas"]
        total_lr = _to_device(plan.total_factors * work.lr, device)[:, None].to(deltas.dtype)
        after = outputs["averaged"], part(outputs, KEPT)
        return sum_updates(work, state, list(clients), deltas, total_lr, client_state, *after)

    def _plan_ahead(self, work: Work, is_stepped: bool) -> None:
        """Plan the next round while the device computes; unused if the next round is another."""
        following = work.after()
        clients: list[int] = following.cohort.tolist()
        if clients:
            plan = plan_cohort(following, clients, is_stepped)
            self._next_plan = following, plan, is_stepped
            work.task.train.prefetch(clients)

    def _plan(self, work: Work, clients: Sequence[int], is_stepped: bool) -> CohortPlan:
        ahead, self._next_plan = self._next_plan, None
        if (
            ahead is not None
            and ahead[2] == is_stepped
            and ahead[0].is_same_round(work)
            and ahead[0].cohort.tolist() == clients
        ):
            return ahead[1]
        return plan_cohort(work, clients, is_stepped)

    def _is_stepped(self, work: Work, state: SimulationState) -> bool:
        """Whether a graph is one step instead of all steps of a round.

        It is where the number of steps changes from cohort to cohort, and for large models, whose
        steps take so long that launching each costs nothing, while capturing all of them does.
        """
        if self.implementation != "layers":
            return False
        train = work.task.train
        if self._sizes is None or self._sizes[0] is not train:
            self._sizes = train, np.array([train.sizes.min(), train.largest])
        sizes = self._sizes[1]
        fewest, most = client_steps(sizes, work.local).tolist()
        batch = work.local.batch_size or int(sizes[1])
        fits = most * len(work.cohort) * batch <= STEPPED_EXAMPLES
        is_large = state.params.numel() >= STEPPED_MODEL and most > 1
        return fits and (fewest < most or is_large)

    def _replays(self, state: SimulationState) -> bool:
        wanted = state.params.is_cuda if self.graphs is None else self.graphs
        return wanted and self._captures_training

    def _replay(
        self, kind: tuple[Any, ...], program: LocalProgram | CudaGraphRound, inputs: Tensors
    ) -> Tensors | None:
        """Run a program by its CUDA graph, captured the first time; return None where that fails.

        A rule or a model that reads numbers on the host cannot be captured, and a whole round may
        be too large: then a graph of local training alone is tried, then none.
        """
        key = (*kind, signature(inputs))
        try:
            if key not in self._met and len(self._met) >= MOST_GRAPHS:
                return None
            self._met.add(key)
            if key not in self._captured:
                if len(self._captured) >= MOST_GRAPHS:  # one that another run has captured
                    del self._captured[next(k for k in self._captured if k not in self._met)]
                with preserved_draws():  # a replay draws the same whether it was just captured
                    self._captured[key] = self.capture(program, inputs, program.warm_up)
            return self._captured[key](inputs)
        except RuntimeError as error:
            self._captured.clear()
            self._met.clear()
            is_round = isinstance(program, CudaGraphRound)
            if isinstance(error, torch.OutOfMemoryError):
                if not is_round:
                    raise
            else:
                subject = "rounds are" if is_round else "local training is"
                warnings.warn(f"{subject} not captured: {error}", EngineWarning, stacklevel=2)
            self._captures_rounds = False
            self._captures_training = is_round
            return None

    def _local_program(self, work: Work, plan: CohortPlan, state: SimulationState) -> LocalProgram:
        objective, lengths = cast(BatchedObjective, work.task.objective), plan.lengths
        short = not self.padded and bool((lengths != plan.width).any())
        return LocalProgram(
            objective,
            work.algorithm.client,
            work.local,
            work.task.transform,
            {} if isinstance(work.task.train, StreamedFederation) else work.task.train.fields,
            steps=len(lengths),
            width=plan.width,
            reach=plan.reach,
            all_active=bool(lengths.all()),
            lengths=lengths if short else None,
            layers=self.implementation == "layers",
        )


def _clients_at_a_time(work: Work, state: SimulationState) -> int:
    """Return how many clients' models and batches fit the memory that is meant for them."""
    fields, sizes = work.task.train.fields.values(), work.task.train.sizes[work.cohort]
    rows = min(work.local.batch_size or int(sizes.max()), int(sizes.max()))
    batch_bytes = rows * sum(value[0].numel() * value.element_size() for value in fields)
    budget = COHORT_BYTES.get(state.params.device.type, 2**30)
    return max(1, budget // (state.params.numel() * state.params.element_size() + batch_bytes))


def _inputs(
    work: Work, state: SimulationState, plan: CohortPlan, client_state: Tensors
) -> dict[str, Tensor]:
    """Return the large inputs of a local program, on the device of the model."""
    device, rows = state.params.device, work.task.train.cohort_rows(plan.who[0].tolist())
    inputs = {
        "params": state.params,
        "averaged": state.buffers.averaged,
        "kept": state.buffers.kept,
        **{f"broadcast.{name}": value for name, value in state.broadcast.items()},
        **{f"client_state.{name}": value for name, value in client_state.items()},
        **{f"data.{name}": value for name, value in rows.items()},
    }
    if plan.factors is not None:
        inputs["factors"] = _to_device(plan.factors, device)
    return inputs if plan.draws is None else {**inputs, "draws": _to_device(plan.draws, device)}


def _to_device(array: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """Return a host array on the device; the host does not wait for the transfer to a GPU."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
