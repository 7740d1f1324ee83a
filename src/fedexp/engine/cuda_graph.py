"""CUDA graphs: a program over tensors that is captured once and replayed for every round.

`CudaGraphRound` is a whole round as such a program: local training, sums and the server step. For
small models the server step is dozens of launches, which take longer than their work. Captured
together with local training they cost next to nothing, and the host waits once per round, for a
handful of numbers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.aggregate import Aggregate, finite_norms
from fedexp.algorithms import Algorithm
from fedexp.client import Tensors
from fedexp.engine.base import RoundResult, buffer_extras, unstacked
from fedexp.engine.local_steps import (
    LocalProgram,
    LocalRun,
    SteppedProgram,
    first_and_last,
    part,
    step_by_step,
)
from fedexp.engine.plan import CohortPlan, Numbers
from fedexp.engine.state import ServerModel, SimulationState, model_step, with_model
from fedexp.errors import first_line
from fedexp.objective import buffer_changes
from fedexp.seeding import preserved_draws

Program = Callable[[Tensors], Tensors]

log = logging.getLogger("fedexp")


class CapturedGraph:
    """A program as one CUDA graph: a call copies its inputs into place and replays it.

    The next call overwrites the returned tensors, and so does that of a graph of the same pool.

    Args:
        program: maps tensors to tensors; a fixed sequence of operations.
        inputs: of the first call.
        warm_up: does the operations of the program once each, so that nothing is compiled or
            allocated while it is captured; None where that has been done.
        pool: memory that graphs share which are never replayed at the same time; None for its own.
    """

    def __init__(
        self,
        program: Program,
        inputs: Tensors,
        warm_up: Program | None = None,
        pool: Any = None,
    ) -> None:
        log.info("capturing a CUDA graph")
        self._program = program  # holds the tensors that a replay reads besides the inputs
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        if warm_up is not None:
            self._warm_up(warm_up)
        self._record(pool)

    def _record(self, pool: Any) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.outputs = self._program(self.inputs)

    def _warm_up(self, program: Program) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            prepare(program, self.inputs)
        torch.cuda.current_stream().wait_stream(side)

    def __call__(self, inputs: Tensors) -> Tensors:
        for name, value in inputs.items():
            if value.numel():
                self.inputs[name].copy_(value, non_blocking=True)
        self._replay()
        return self.outputs

    def _replay(self) -> None:
        self.graph.replay()


class CapturedSteps(CapturedGraph):
    """A program that repeats a step as three CUDA graphs: up to the first step, a step, the last.

    The graph of a step is replayed as often as `steps` among the inputs requires, which is on the
    host. A step is captured once or twice instead of S times, for any S.
    """

    def _record(self, pool: Any) -> None:
        program = self._program
        assert isinstance(program, SteppedProgram)
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._begin: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._begin, pool=pool):
            self._run = program.begin(self.inputs)
        self._step: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._step, pool=pool):
            program.step(self._run)
        self._finish: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._finish, pool=pool):
            self.outputs = program.finish(self._run)

    def _replay(self) -> None:
        self._begin.replay()
        for _ in range(int(self.inputs["steps"]) - 1):
            self._step.replay()
        self._finish.replay()


def capture_graph(
    program: Program, inputs: Tensors, warm_up: Program | None = None, pool: Any = None
) -> CapturedGraph:
    """Capture a program, step by step where the inputs have a number of `steps`."""
    kind = CapturedSteps if "steps" in inputs else CapturedGraph
    return kind(program, inputs, warm_up, pool)


class RepeatedProgram:
    """Captures a program as a CUDA graph at the first call, and replays it at every call.

    Also at the first, since a replay may round otherwise than a call. Where the program cannot be
    captured, it is called every time.
    """

    def __init__(self, capture: Callable[[Program, Tensors], Program] = CapturedGraph) -> None:
        self._capture = capture
        self._graph: Program | None = None
        self._able = True

    def __call__(self, program: Program, inputs: Tensors) -> Tensors:
        if self._graph is None and self._able:
            try:
                with preserved_draws():  # a replay draws the same whether it was just captured
                    prepare(program, inputs)
                    self._graph = self._capture(program, inputs)
            except RuntimeError as error:
                log.info("a program is not captured: %s", first_line(error))
                self._able = False
        return program(inputs) if self._graph is None else self._graph(inputs)


def prepare(program: Program, inputs: Tensors) -> None:
    """Call a program, so that its kernels are compiled; raise if it cannot be captured."""
    try:
        with no_synchronization():
            program(inputs)
    except RuntimeError:  # preparing a kernel may wait for the device, but only once
        program(inputs)
        with no_synchronization():
            program(inputs)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Raise where the host waits for the device: after a failed capture, torch cannot seed."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch warns that it may miss some, which a user cannot fix
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def signature(inputs: Tensors) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Return what must be equal for a captured graph to be replayed: names, shapes and types."""
    return tuple((name, inputs[name].shape, inputs[name].dtype) for name in sorted(inputs))


@dataclass(frozen=True, eq=False)
class CudaGraphRound:
    """A whole round as a program.

    Inputs: those of the local program and `server.*`; small ones are in one array, `small`
    (`pack_inputs`). Outputs: the model after the server step (`params`, `averaged`, `server.*`,
    `broadcast.*`), new client states (`client_state.*` [K, ...]) with `good` [K], metrics
    (`metric.*`), and all numbers for the host in `numbers`.
    """

    local: LocalProgram
    algorithm: Algorithm
    total_weight: float

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        if "steps" in inputs:
            return step_by_step(self, inputs)
        inputs = unpack_inputs(inputs, self.local.steps)
        return self._server_step(inputs, self.local(inputs))

    def warm_up(self, inputs: Tensors) -> dict[str, Tensor]:
        """Run a round of one local step, or two where the last differs; return its outputs."""
        if "steps" in inputs:
            return step_by_step(self, first_and_last(inputs))
        program, inputs = self.local.first_step(unpack_inputs(inputs, self.local.steps))
        return self._server_step(inputs, program(inputs))

    def begin(self, inputs: Tensors) -> tuple[Tensors, LocalRun]:
        """Return the inputs of the round, and all clients before the first step."""
        inputs = unpack_inputs(inputs, self.local.steps)
        return inputs, self.local.begin(inputs)

    def step(self, run: tuple[Tensors, LocalRun]) -> None:
        """Take the next local step, but not the last one."""
        self.local.step(run[1])

    def finish(self, run: tuple[Tensors, LocalRun]) -> dict[str, Tensor]:
        """Take the last local step and the server step; return what a call returns."""
        inputs, local = run
        return self._server_step(inputs, self.local.finish(local))

    def _server_step(self, inputs: Tensors, trained: Tensors) -> dict[str, Tensor]:
        broadcast, client_state = part(inputs, "broadcast."), part(inputs, "client_state.")
        deltas = trained["deltas"]
        total_lr = inputs["total_lr"].to(deltas.dtype)
        rule = self.algorithm.client
        new_states, extras = rule.end_round(deltas, total_lr, broadcast, client_state)
        weights, factor = inputs["weights"], rule.weight_factor(inputs["total_lr"])
        if trained["averaged"].numel():
            changes = buffer_changes(trained["averaged"], inputs["averaged"])
            extras = {**extras, **buffer_extras(changes, factor)}
        if factor is not None:
            weights = weights * (factor.flatten() if isinstance(factor, Tensor) else factor)
        known = finite_norms(deltas, extras)
        aggregate = Aggregate.of_checked(deltas, weights, extras, known)
        server = part(inputs, "server.")
        before = ServerModel(inputs["params"], inputs["averaged"], server, broadcast)
        model, metrics = model_step(self.algorithm, before, aggregate, self.total_weight)
        numbers = [aggregate.count, aggregate.dropped, *(metrics[n] for n in sorted(metrics))]
        return {
            "params": model.params,
            "averaged": model.averaged,
            "numbers": torch.stack([n.to(torch.float64) for n in numbers]),
            **({"good": known.finite} if new_states else {}),
            **_prefixed("server.", model.server),
            **_prefixed("broadcast.", model.broadcast),
            **_prefixed("client_state.", new_states),
            **_prefixed("metric.", metrics),
        }


def round_result(
    outputs: Tensors, state: SimulationState, algorithm: Algorithm, clients: list[int]
) -> RoundResult:
    """Return the result of a `CudaGraphRound`, in copies: the next replay overwrites outputs."""
    lasting = (n for n in outputs if n != "numbers" and not n.startswith("metric."))
    own = {name: outputs[name].clone() for name in lasting}
    count, dropped, *values = outputs["numbers"].tolist()  # here the host waits
    if not count:
        return RoundResult(state, 0, int(dropped), {}, {})
    server, broadcast, states = (part(own, p) for p in ("server.", "broadcast.", "client_state."))
    model = ServerModel(own["params"], own["averaged"], server, broadcast)
    metrics = dict(zip(sorted(part(outputs, "metric.")), values, strict=True))
    changed = unstacked(states, clients, own["good"]) if states else {}
    after = with_model(state, model, algorithm)
    return RoundResult(after, int(count), int(dropped), metrics, changed)


def pack_inputs(key: int, lr: float, plan: CohortPlan, weights: list[float]) -> Numbers:
    """Return the small inputs as one array of 64-bit words, because every transfer takes time."""
    numbers = np.concatenate([[lr], plan.total_factors * lr, weights]).view(np.int64)
    return np.concatenate([[key], plan.table.ravel(), numbers])


def unpack_inputs(inputs: Tensors, steps: int) -> dict[str, Tensor]:
    """Replace `small` by `key`, `table` [3 + S, K], `lr`, `total_lr` [K, 1] and `weights` [K]."""
    clients = (len(inputs["small"]) - 2) // (steps + 5)
    key, table, *floats = inputs["small"].split([1, (3 + steps) * clients, 1, clients, clients])
    lr, total_lr, weights = (each.view(torch.float64) for each in floats)
    return {
        **{name: value for name, value in inputs.items() if name != "small"},
        "key": key[0],
        "table": table.view(3 + steps, clients),
        "lr": lr[0],
        "total_lr": total_lr[:, None],
        "weights": weights,
    }


def _prefixed(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}
