"""Local training of many clients as one program over tensors: eager, compiled, or one CUDA graph.

Everything that changes from round to round is an input tensor, the learning rate included, so that
the program can be captured once and replayed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedexp.client import ClientRule
from fedexp.data.federation import Batch
from fedexp.data.transform import Transform
from fedexp.engine.plan import step_rows
from fedexp.engine.walks import LayerWalk, RowWalk, Walk, advanced, part
from fedexp.kernels.fuse import fused
from fedexp.local import LocalTraining
from fedexp.objective import BatchedObjective, Buffers, ModuleObjective

Tensors = Mapping[str, Tensor]
Program = Callable[[Tensors], Tensors]
AT_ONCE = 2**28  # bytes of examples that are fetched for all steps together


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """S steps of K clients.

    Inputs: `params` [d], `averaged` and `kept` buffers, `shared.*` [d] and `mine.*` [K, d] of the
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
        kinds = ("params", "shared.", "mine.")
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
