"""Local training of K clients as one program over tensors, for the batched engine.

Everything that changes from round to round is an input tensor, the learning rate included, so that
the program can be captured once as a CUDA graph and replayed. `RowSteps` has a parameter vector per
client, which suits every model and rule; `LayerSteps` stores parameters layer by layer, which is
faster on a GPU. Its steps are all alike, so that a graph of one step serves cohorts whose clients
take different numbers of steps: the step then counts itself, on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.client import ClientRule, Tensors
from fedexp.data.federation import Batch
from fedexp.data.transforms import Transform
from fedexp.engine.plan import Numbers, device_rows
from fedexp.kernels.layers import ALIGNMENT, Correction, Layers, clipped_lrs, sgd_step
from fedexp.local import KEPT, LocalTraining, init_moments, local_step, optimizer_step
from fedexp.objective import BatchedObjective, Buffers, StackedObjective
from fedexp.objective.stack import StackedClients

AT_ONCE = 2**28  # bytes of examples that are fetched for all steps together


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """S steps of K clients.

    Inputs: `params` [d], `averaged` and `kept` buffers, `broadcast.*` [d] and `client_state.*`
    [K, d] of the client rule, `optimizer.*` [K, ...] where the optimisers' states survive rounds,
    the plan's `table` [3 + S, K], `lr`, `draws` where there are any, `data.*` for examples that are
    not those of `fields`, `factors` [S, K] on the learning rate where it changes from step to step,
    and either the rows of the plan, `rows` [S, K, B], or the round's `key` to compute them on the
    device. With `steps`, a number on the host, only so many of the S steps are taken, one after
    another (`begin`, `step`, `finish`). Outputs: `deltas` [K, d], the start of all clients minus
    their parameters, `averaged` and `kept` [K, ...], and `optimizer.*`.

    Attributes:
        fields: the examples on the device; none where they are inputs.
        steps, width, reach: of the plan.
        all_active: every client takes part in every step.
        lengths: of the batches, [S, K], where they must not be padded; else None.
        layers: whether parameters are stored layer by layer; model and rule must allow it.
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
    lengths: Numbers | None = None
    layers: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a captured graph is specific to, beside the shapes of its inputs."""
        exact = () if self.lengths is None else tuple(self.lengths[:, 0].tolist())
        return self.steps, self.width, self.reach, self.all_active or self.layers, *exact

    @property
    def is_static(self) -> bool:
        """Whether the shapes of a step are the same for every cohort of such clients."""
        return self.lengths is None or bool((self.lengths == self.lengths[:, :1]).all())

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        if "steps" in inputs:
            return step_by_step(self, inputs)
        run = self.begin(inputs)
        for s in range(self.steps):
            run.step(s, is_last=s == self.steps - 1)
        return run.result()

    def begin(self, inputs: Tensors) -> LocalRun:
        """Return all clients at the model of the server, before the first step."""
        size, inputs = inputs["params"].numel(), self._aligned(inputs)
        who, lengths = inputs["table"].tensor_split((3,))
        rows = inputs.get("rows")
        if rows is None:
            sizes = (self.steps, self.width, self.reach)
            rows = device_rows(inputs["key"], who, *sizes, self.local.batch_size)
        place = torch.arange(self.width, device=lengths.device)
        valid = (place < lengths[:, :, None]).to(inputs["params"])
        batches = self._batches(part(inputs, "data.") or self.fields, rows, inputs)
        steps = self._init(inputs, partial(batches, 0), valid)
        counter = torch.zeros(1, dtype=torch.int64, device=lengths.device)
        return LocalRun(steps, batches, self.lengths, size, counter)

    def step(self, run: LocalRun) -> None:
        """Take the step that the run's counter names, but not the last one."""
        run.step(run.counter, is_last=False)
        run.counter.add_(1)

    def finish(self, run: LocalRun) -> dict[str, Tensor]:
        """Take the last step; return what a call returns."""
        run.step(run.counter, is_last=True)
        return run.result()

    def first_step(self, inputs: Tensors) -> tuple[LocalProgram, Tensors]:
        """Return the program of the first step alone, which prepares all that the others need."""
        rows = {"table": 4, "draws": 1, "factors": 1, "rows": 1}  # [3 + S, K] and [S, ...]
        some = {n: v[: rows[n]] if n in rows else v for n, v in inputs.items()}
        lengths = None if self.lengths is None else self.lengths[:1]
        return replace(self, steps=1, lengths=lengths), some

    def warm_up(self, inputs: Tensors) -> dict[str, Tensor]:
        """Take the first step, and a last one where it has a graph; return what a call returns."""
        if "steps" in inputs:
            return step_by_step(self, first_and_last(inputs))
        program, inputs = self.first_step(inputs)
        return program(inputs)

    def _init(
        self, inputs: Tensors, batch: Callable[[], Batch], valid: Tensor
    ) -> RowSteps | LayerSteps:
        """Return all clients at the model of the server; kernels are compiled for the first batch.

        `valid` [S, K, B] is 1 for an example and 0 for padding.
        """
        clients = valid.shape[1]
        buffers = Buffers(*(inputs[n].expand(clients, -1) for n in ("averaged", "kept")))
        if not self.layers:
            return RowSteps(self, inputs, buffers, valid)
        assert isinstance(self.objective, StackedObjective)
        stacked = self.objective.stacked_clients(inputs["params"], clients)
        sgd = InPlaceSgd(stacked.layers, valid, self.rule, self.local, inputs)
        steps = LayerSteps(stacked, buffers, valid, sgd)
        self.objective.compile_kernels(lambda: steps.launch_all(batch()))
        return steps

    def _aligned(self, inputs: Tensors) -> Tensors:
        """Return the inputs with zeros behind vectors, so that rows start at aligned addresses."""
        size = inputs["params"].numel()
        if self.layers or not isinstance(self.objective, StackedObjective):
            return inputs
        if not self.rule.is_linear:
            return inputs  # a rule that is not linear may count the zeros
        padding = -size % self.objective.row_multiple()
        if not padding:
            return inputs
        vectors = ("params", "broadcast.", "client_state.", KEPT)
        return {
            name: F.pad(value, (0, padding))
            if name.startswith(vectors) and value.shape[-1] == size
            else value
            for name, value in inputs.items()
        }

    def _batches(
        self, fields: Batch, rows: Tensor, inputs: Tensors
    ) -> Callable[[int | Tensor], Batch]:
        """Return a function that gives the batch of a step; small ones are fetched all at once."""
        draws = inputs.get("draws")
        if draws is None and self.local.batch_size is None:  # all of the data in every step
            whole = self._batch(fields, rows[0], None)
            return lambda s: whole
        if self.local.batch_size is None:  # `host_rows` returns one step for all
            rows = rows[:1].expand(self.steps, -1, -1)
        is_small = rows.is_cuda and _bytes(fields, rows) <= AT_ONCE and "steps" not in inputs
        if draws is None and is_small:
            every = self._batch(fields, rows.flatten(0, 1), None)
            steps = {name: value.unflatten(0, rows.shape[:2]) for name, value in every.items()}
            return lambda s: {name: at_step(value, s) for name, value in steps.items()}
        return lambda s: self._batch(
            fields, at_step(rows, s), None if draws is None else at_step(draws, s)
        )

    def _batch(self, fields: Batch, rows: Tensor, draws: Tensor | None) -> Batch:
        batch: Batch = {name: value[rows] for name, value in fields.items()}
        return batch if self.transform is None else self.transform.train(batch, draws)


@dataclass(frozen=True, eq=False)
class LocalRun:
    """Local training in progress.

    Attributes:
        steps: the clients.
        batches: the batch of each step, [K, B, ...].
        lengths: as in `LocalProgram`.
        size: the number of parameters, without padding.
        counter: the number of the next step on the device, [1], for steps that count themselves.
    """

    steps: RowSteps | LayerSteps
    batches: Callable[[int | Tensor], Batch]
    lengths: Numbers | None
    size: int
    counter: Tensor

    def step(self, s: int | Tensor, is_last: bool) -> None:
        """Take step s of all clients."""
        lengths = self.lengths[s] if isinstance(s, int) and self.lengths is not None else None
        self.steps.step(s, self.batches(s), lengths, is_last)

    def result(self) -> dict[str, Tensor]:
        deltas, buffers, moments = self.steps.result()
        return {
            "deltas": deltas[:, : self.size],
            "averaged": buffers.averaged,
            "kept": buffers.kept,
            **{KEPT + name: value[:, : self.size] for name, value in moments.items()},
        }


@runtime_checkable
class SteppedProgram(Protocol):
    """A program that repeats one step."""

    def begin(self, inputs: Tensors) -> Any: ...

    def step(self, run: Any) -> None: ...

    def finish(self, run: Any) -> dict[str, Tensor]: ...


def step_by_step(program: SteppedProgram, inputs: Tensors) -> dict[str, Tensor]:
    """Run a program with as many steps as `steps` among the inputs."""
    run = program.begin(inputs)
    for _ in range(int(inputs["steps"]) - 1):
        program.step(run)
    return program.finish(run)


def first_and_last(inputs: Tensors) -> Tensors:
    """Return the inputs of a run of two steps: clients that take fewer are not active in both."""
    return {**inputs, "steps": torch.full_like(inputs["steps"], 2)}


def at_step(values: Tensor, s: int | Tensor) -> Tensor:
    """Return values[s]; the host does not wait for a number [1] on the device."""
    return values[s] if isinstance(s, int) else values.index_select(0, s)[0]


def _bytes(fields: Batch, rows: Tensor) -> int:
    """Return the bytes of the examples in these rows as floating-point numbers."""
    return 4 * rows.numel() * sum(value[:1].numel() for value in fields.values())


class RowSteps:
    """K clients during local training, with a vector for each.

    Args:
        program: the objective, the rule and the settings.
        inputs: of the program.
        buffers: of all clients, [K, ...].
        valid: 1 for an example and 0 for padding, [S, K, B].
    """

    def __init__(
        self, program: LocalProgram, inputs: Tensors, buffers: Buffers, valid: Tensor
    ) -> None:
        rule, local, start = program.rule, program.local, inputs["params"]
        clients, size = valid.shape[1], len(start)
        self.program, self.inputs, self.buffers, self.valid = program, inputs, buffers, valid
        self.params = start.repeat(clients, 1)
        self.stored = part(inputs, KEPT)
        self.moments: Tensors = self.stored or init_moments(self.params, local)
        # the learning rate of all steps, or of each, [S, K]
        self.rates = inputs["lr"] * inputs["factors"] if "factors" in inputs else inputs["lr"]
        self.sgd: InPlaceSgd | None = None
        if start.is_cuda and rule.is_linear and local.is_plain_sgd and not size % ALIGNMENT:
            self.sgd = InPlaceSgd(Layers(clients, (size,)), valid, rule, local, inputs)

    def step(self, s: int | Tensor, batch: Batch, lengths: Numbers | None, is_last: bool) -> None:
        """Take step s; a client without a valid example in it does not change."""
        assert isinstance(s, int)  # a graph of one step is for parameters layer by layer
        if lengths is not None and not lengths.any():
            return
        objective, params, buffers = self.program.objective, self.params, self.buffers
        valid = self.valid[s]
        if lengths is None:
            grads, after = objective.gradients(params, buffers, batch, valid)
        else:
            grads, after = _by_length(objective, params, buffers, batch, valid, lengths)
        active = valid[:, :1] > 0
        grads = grads.to(params.dtype)
        if self.sgd is not None:
            self.sgd(s, params.view(-1), grads.contiguous().view(-1))
        else:
            self._update(s, grads, active)
        if not self.program.all_active and after is not buffers:
            pairs = zip(after, buffers, strict=True)
            after = Buffers(*(torch.where(active, new, old) for new, old in pairs))
        self.buffers = after

    def _update(self, s: int, grads: Tensor, active: Tensor) -> None:
        """Take a step; clients that are not active do not change.

        Their moments may, unless they are kept: such a client has taken its last step.
        """
        rule, local, params = self.program.rule, self.program.local, self.params
        states = part(self.inputs, "broadcast."), part(self.inputs, "client_state.")
        correct = rule.correct
        if not rule.is_linear:  # a rule of the user's own may look at all of its client's gradient
            correct = torch.func.vmap(
                rule.correct, in_dims=(0, 0, None, None, 0), randomness="different"
            )
        grads = correct(grads, params, self.inputs["params"], *states)
        lr = self.rates[s, :, None] if self.rates.ndim else self.rates
        if local.is_plain_sgd:
            after = local_step(params, grads, lr, local)
        else:
            number = torch.full((), s + 1.0, dtype=self.rates.dtype, device=self.rates.device)
            if self.stored:
                number = number + self.stored["steps"]
            after, moments = optimizer_step(params, grads, self.moments, number, lr, local)
            if self.stored and not self.program.all_active:
                moments = {n: torch.where(active, m, self.moments[n]) for n, m in moments.items()}
            self.moments = moments
        self.params = after if self.program.all_active else torch.where(active, after, params)

    def result(self) -> tuple[Tensor, Buffers, Tensors]:
        """Return the start minus the parameters, a vector for each client, the buffers, and the
        moments with their number of steps where they are kept."""
        moments: Tensors = {}
        if self.stored:
            taken = (self.valid[:, :, :1] > 0).sum(dim=0)
            moments = {**self.moments, "steps": self.stored["steps"] + taken}
        return self.inputs["params"] - self.params, self.buffers, moments


class InPlaceSgd:
    """The SGD step of all clients in place, by the kernels of `fedexp.kernels.layers`.

    For rules with a linear correction and local SGD without momentum. On a CPU the plain twin of
    the kernels runs, so that this path can be tested without a GPU.
    """

    def __init__(
        self,
        layers: Layers,
        valid: Tensor,
        rule: ClientRule,
        local: LocalTraining,
        inputs: Tensors,
    ) -> None:
        self.layers, self.lr, self.bound = layers, inputs["lr"], local.clip_norm
        prox, offset = rule.linear_correction(
            part(inputs, "broadcast."), part(inputs, "client_state.")
        )
        by_layer = None if offset is None else layers.pack(offset)
        self.correction = Correction(prox, inputs["params"], by_layer)
        # computed once for all steps, since kernel launches dominate the time of a small model
        self.active = valid[:, :, 0] > 0
        self.rates = self.lr.to(valid.dtype).repeat(valid.shape[1])
        self.shrink = (1 - self.lr * local.weight_decay).to(valid.dtype)

    def __call__(
        self,
        s: int | Tensor,
        params: Tensor,
        grads: Tensor,
        copy: Tensor | None = None,
        deltas: Tensor | None = None,
    ) -> None:
        """Take step s; `params`, `grads` and `copy` are layer by layer, `deltas` is [K, d]."""
        rates = self.rates
        if self.bound is not None:
            operands = (params, grads, self.correction, self.lr, self.bound)
            rates = clipped_lrs(self.layers, *operands)
        settings = (self.correction, rates, self.shrink, at_step(self.active, s))
        sgd_step(self.layers, params, grads, *settings, copy, deltas)


class LayerSteps:
    """K clients during local training, with parameters layer by layer; no model with buffers."""

    def __init__(
        self, clients: StackedClients, buffers: Buffers, valid: Tensor, sgd: InPlaceSgd
    ) -> None:
        self.clients, self.buffers, self.sgd = clients, buffers, sgd
        self.counted = valid / valid.sum(dim=2, keepdim=True)
        layers, params = clients.layers, clients.params
        self.deltas = params.new_empty(layers.clients, sum(layers.sizes))

    def step(self, s: int | Tensor, batch: Batch, lengths: Numbers | None, is_last: bool) -> None:
        clients = self.clients
        grads = clients.gradients(batch, at_step(self.counted, s))
        self.sgd(s, clients.params, grads, clients.copy, self.deltas if is_last else None)

    def launch_all(self, batch: Batch) -> None:
        """Launch every kernel of a round: those of a step, of the last one, and of the sums."""
        for is_last in (False, True):
            self.step(0, batch, None, is_last)
        Aggregate.of_checked(self.deltas, None, {})

    def result(self) -> tuple[Tensor, Buffers, Tensors]:
        return self.deltas, self.buffers, {}


def part(inputs: Tensors, prefix: str) -> dict[str, Tensor]:
    """Return the inputs whose names start with `prefix`, without it."""
    return {n.removeprefix(prefix): v for n, v in inputs.items() if n.startswith(prefix)}


def _by_length(
    objective: BatchedObjective,
    params: Tensor,
    buffers: Buffers,
    batch: Batch,
    valid: Tensor,
    lengths: Numbers,
) -> tuple[Tensor, Buffers]:
    """Return gradients in groups of equal batches, for models and losses that mix examples."""
    longest = int(lengths.max())
    if (lengths == longest).all():
        whole = {name: value[:, :longest] for name, value in batch.items()}
        return objective.gradients(params, buffers, whole, valid[:, :longest])
    grads, after = torch.zeros_like(params), Buffers(*(b.clone() for b in buffers))
    for length in np.unique(lengths[lengths > 0]):
        who = torch.from_numpy(np.flatnonzero(lengths == length)).to(params.device)
        some = {name: value[who, :length] for name, value in batch.items()}
        own = Buffers(*(b[who] for b in buffers))
        grads[who], new = objective.gradients(params[who], own, some, valid[who, :length])
        for target, value in zip(after, new, strict=True):
            target[who] = value
    return grads, after
