"""Local training of many clients as one program over tensors: eager, compiled, or one CUDA graph.

Everything that changes from round to round is an input tensor, the learning rate included, so that
the program can be captured once and replayed.

A whole round as one program: local training, sums and the server's step.

For small models, what the server does between two rounds are dozens of launches that take longer
than their work. Captured together with local training they cost next to nothing, and the host waits
once a round, for a handful of numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedexp.aggregate import Aggregate, usable
from fedexp.algorithms import Algorithm
from fedexp.client import ClientRule
from fedexp.data.federation import Batch
from fedexp.data.transforms import Transform
from fedexp.engine.local_steps import LayerWalk, RowWalk, Walk, advanced, part
from fedexp.engine.plan import step_rows
from fedexp.engine.state import Model, SimulationState, moved, server_update
from fedexp.kernels.launch import fused
from fedexp.local import LocalTraining
from fedexp.objective import BatchedObjective, Buffers, ModuleObjective, buffer_changes

Tensors = Mapping[str, Tensor]
Program = Callable[[Tensors], Tensors]
AT_ONCE = 2**28  # bytes of examples that are fetched for all steps together


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """S steps of K clients.

    Inputs: `params` [d], `averaged` and `kept` buffers, `broadcast.*` [d] and
    `client_state.*` [K, d] of the
    client rule, `key` and `who` [3, K] of the plan, `draws` where there are any, `data.*` for
    examples that are not those of `fields`, and `lr`. Outputs: `params` [K, d], `averaged`, `kept`.

    Attributes:
        steps, width, reach: of the plan.
        all_active: every client takes part in every step.
        lengths: of the batches, [S, K], where they must not be padded; else None.
        fuse: whether `torch.compile` is to merge the arithmetic of an update.
        layered: whether parameters are stored layer by layer; model and rule must allow it.
    """

    objective: BatchedObjective
    rule: ClientRule
    local: LocalTraining
    transform: Transform | None
    fields: Batch
    steps: int
    width: int
    reach: int
    all_active: bool = True
    lengths: NDArray[np.int64] | None = None
    fuse: bool = False
    layered: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a captured program is made for, beside the shapes of its inputs."""
        exact = () if self.lengths is None else tuple(self.lengths[:, 0].tolist())
        return self.steps, self.width, self.reach, self.all_active, *exact

    @property
    def is_static(self) -> bool:
        """Whether the shapes of a step are the same for every cohort of such clients."""
        return self.lengths is None or bool((self.lengths == self.lengths[:, :1]).all())

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        size, inputs = inputs["params"].numel(), self._aligned(inputs)
        who, batch_size = inputs["who"], self.local.batch_size
        rows = step_rows(inputs["key"], who, self.steps, self.width, self.reach, batch_size)
        valid = self._valid(who[1]).to(inputs["params"])
        walk: Walk | None = None
        fields = part(inputs, "data.") or self.fields
        for s, batch in enumerate(self._batches(fields, rows, inputs.get("draws"))):
            walk = walk or self._setting_out(inputs, batch, valid)
            walk.step(s, batch, None if self.lengths is None else self.lengths[s])
        assert walk is not None  # there is a step
        params, buffers = walk.where()
        return {"params": params[:, :size], "averaged": buffers.averaged, "kept": buffers.kept}

    def _setting_out(self, inputs: Tensors, batch: Batch, valid: Tensor) -> Walk:
        """All clients at the model of the server; the first batch shows what the model can do.

        `valid` [S, K, B] tells which rows count in which step.
        """
        clients = inputs["who"].shape[1]
        params = inputs["params"].repeat(clients, 1)
        buffers = Buffers(*(inputs[n].expand(clients, -1) for n in ("averaged", "kept")))
        rule, local = self.rule, self.local
        if self.layered:
            assert isinstance(self.objective, ModuleObjective)
            stack = self.objective.layered(params, batch, valid[0], self.fuse)
            return LayerWalk(stack, buffers, valid, rule, local, inputs)
        advance = fused(advanced) if self.fuse else advanced
        all_active = self.all_active
        move = partial(advance, inputs=inputs, rule=rule, local=local, all_active=all_active)
        return RowWalk(self.objective, params, buffers, valid, move, all_active)

    def _aligned(self, inputs: Tensors) -> Tensors:
        """Vectors with zeros behind them, so that every row begins where a GPU likes to read."""
        size = inputs["params"].numel()
        multiple = self.objective.aligned if isinstance(self.objective, ModuleObjective) else 1
        multiple = multiple if self.rule.is_linear else 1  # others may count the zeros
        behind = -size % multiple
        if not behind:
            return inputs
        kinds = ("params", "broadcast.", "client_state.")
        return {
            name: F.pad(value, (0, behind))
            if name.startswith(kinds) and value.shape[-1] == size
            else value
            for name, value in inputs.items()
        }

    def _valid(self, sizes: Tensor) -> Tensor:
        """Whether a row of a batch counts, [S, K, B]: `plan.step_lengths` on the device."""
        batch = torch.full_like(sizes, self.local.batch_size or 0)
        batch = sizes if self.local.batch_size is None else batch
        per_epoch = (sizes + batch - 1) // batch
        step = torch.arange(self.steps, device=sizes.device)[:, None]
        left = sizes - step % per_epoch * batch
        if self.local.epochs is not None:
            left = torch.where(step < self.local.epochs * per_epoch, left, 0)
        place = torch.arange(self.width, device=sizes.device)
        return place < torch.minimum(left, batch)[:, :, None]

    def _batches(self, fields: Batch, rows: Tensor, draws: Tensor | None) -> Iterator[Batch]:
        """The batches of every step, [K, B, ...]; fetched all at once where they are small."""
        if draws is None and self.local.batch_size is None:  # all of the data in every step
            yield from repeat(self._batch(fields, rows[0], None), self.steps)
        elif draws is None and rows.is_cuda and self._bytes(rows) <= AT_ONCE:
            every = self._batch(fields, rows.flatten(0, 1), None)
            whole = {name: value.unflatten(0, rows.shape[:2]) for name, value in every.items()}
            yield from ({name: value[s] for name, value in whole.items()} for s in range(len(rows)))
        else:
            for s in range(self.steps):
                yield self._batch(fields, rows[s], None if draws is None else draws[s])

    def _bytes(self, rows: Tensor) -> int:
        """Of the examples in these rows as floating-point numbers."""
        return 4 * rows.numel() * sum(value[:1].numel() for value in self.fields.values())

    def _batch(self, fields: Batch, rows: Tensor, draws: Tensor | None) -> Batch:
        batch: Batch = {name: value[rows] for name, value in fields.items()}
        return batch if self.transform is None else self.transform.train(batch, draws)


class Captured:
    """A program as one CUDA graph: inputs are copied into place, then it is replayed.

    What it returns is overwritten by the next call.
    """

    def __init__(self, program: Program, inputs: Tensors) -> None:
        self.inputs = {name: value.clone() for name, value in inputs.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile and warm up before anything is recorded
            program(self.inputs)
            with _never_waiting():
                program(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = program(self.inputs)

    def __call__(self, inputs: Tensors) -> Tensors:
        for name, value in inputs.items():
            if value.numel():
                self.inputs[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return self.outputs


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Fail where the host waits for the device: after a failed capture, torch draws no numbers."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # torch says that it may miss some, which a user cannot mend
        warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def signature(inputs: Tensors) -> tuple[tuple[str, torch.Size], ...]:
    """What must be the same for a captured program to be replayed."""
    return tuple((name, value.shape) for name, value in sorted(inputs.items()))


class Finished(NamedTuple):
    """A round that is over: the state after it, its numbers, and what its clients keep."""

    state: SimulationState
    clients: int
    dropped: int
    metrics: dict[str, float]
    changed: dict[int, Tensors]


@dataclass(frozen=True, eq=False)
class WholeRound:
    """Inputs are those of the local program and `server.*`; small ones come `packed`.

    Outputs: the model after the step (`params`, `averaged`, `server.*`, `broadcast.*`), what
    clients
    keep (`after.*` [K, ...]) with `good` [K], the metrics, and all numbers in `numbers`.
    """

    local: LocalProgram
    algorithm: Algorithm
    total_weight: float

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        inputs = unpacked(inputs)
        trained = self.local(inputs)
        broadcast, client_state = part(inputs, "broadcast."), part(inputs, "client_state.")
        deltas = inputs["params"] - trained["params"]
        total_lr = inputs["total_lr"].to(deltas.dtype)
        kept, extras = self.algorithm.client.end_round(deltas, total_lr, broadcast, client_state)
        if trained["averaged"].numel():
            changes = buffer_changes(trained["averaged"], inputs["averaged"])
            extras = {**extras, "buffers": changes}
        aggregate = Aggregate.of_checked(deltas, inputs["weights"], extras)
        before = Model(inputs["params"], inputs["averaged"], part(inputs, "server."), broadcast)
        model, metrics = moved(self.algorithm, before, aggregate, self.total_weight)
        numbers = [aggregate.count, aggregate.dropped, *(metrics[n] for n in sorted(metrics))]
        return {
            "params": model.params,
            "averaged": model.averaged,
            "numbers": torch.stack([n.to(torch.float64) for n in numbers]),
            **({"good": usable(deltas, extras)} if kept else {}),
            **_named("server.", model.server),
            **_named("broadcast.", model.broadcast),
            **_named("after.", kept),
            **_named("metric.", metrics),
        }


def finished(
    outputs: Tensors, state: SimulationState, algorithm: Algorithm, clients: list[int]
) -> Finished:
    """What a round has come to; copies, because the next one writes over its outputs."""
    lasting = (n for n in outputs if n != "numbers" and not n.startswith("metric."))
    own = {name: outputs[name].clone() for name in lasting}
    count, dropped, *values = outputs["numbers"].tolist()  # here the host waits
    if not count:
        return Finished(state, 0, int(dropped), {}, {})
    server, broadcast, kept = (part(own, prefix) for prefix in ("server.", "broadcast.", "after."))
    model = Model(own["params"], own["averaged"], server, broadcast)
    metrics = dict(zip(sorted(part(outputs, "metric.")), values, strict=True))
    changed = unstacked(kept, clients, own["good"]) if kept else {}
    return Finished(
        server_update(state, model, algorithm), int(count), int(dropped), metrics, changed
    )


def unstacked(kept: Tensors, clients: Sequence[int], good: Tensor) -> dict[int, Tensors]:
    """The states of the clients whose updates count."""
    rows = [{name: value[k] for name, value in kept.items()} for k in range(len(clients))]
    return {c: row for c, row, ok in zip(clients, rows, good.tolist(), strict=True) if ok}


def packed(
    key: int, lr: float, who: NDArray[np.int64], steps: NDArray[np.int64], weights: list[float]
) -> NDArray[np.int64]:
    """The small inputs as one array of 64 bits each, because every transfer takes its time."""
    numbers = np.concatenate([[lr], steps * lr, weights]).view(np.int64)
    return np.concatenate([[key], who.ravel(), numbers])


def unpacked(inputs: Tensors) -> dict[str, Tensor]:
    """The inputs with `key`, `who`, `lr`, `total_lr` [K, 1] and `weights` [K] for `packed`."""
    clients = (len(inputs["packed"]) - 2) // 5
    key, who, *numbers = inputs["packed"].split([1, 3 * clients, 1, clients, clients])
    lr, total_lr, weights = (each.view(torch.float64) for each in numbers)
    rest = {name: value for name, value in inputs.items() if name != "packed"}
    small = {"key": key[0], "who": who.view(3, clients), "lr": lr[0]}
    return {**rest, **small, "total_lr": total_lr[:, None], "weights": weights}


def _named(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}
