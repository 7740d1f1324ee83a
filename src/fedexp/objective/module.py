"""The loss of any `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedexp.data.federation import Batch
from fedexp.errors import require
from fedexp.objective.base import Buffers
from fedexp.objective.flat import flatten, pieces, unflatten_into
from fedexp.objective.layered import LayeredStack
from fedexp.objective.stack import Alone, Stack, can_stack
from fedexp.precision import Precision, arithmetic
from fedexp.seeding import seeded_torch

FUSED_WEIGHTS = 16  # compiling a model of more takes longer than it saves


class ModuleObjective:
    """The loss of any `nn.Module` on batches of `x` and `y`.

    The module is scratch space: parameters and buffers are set from the arguments at every call,
    so the methods are pure to their callers. Threads must not share one: give each its own task.
    Parameters that need no gradient are those of the first module built, whatever the seed.

    Args:
        build: makes a module; it is called under a seed, so the initial weights follow from it.
            Or a module, whose weights are the initial ones.
        loss: per-example loss of (output, y), i.e. with `reduction="none"`.
        classifies: whether the largest output names the class, so that accuracy has a meaning.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        classifies: bool = True,
    ) -> None:
        self.build = partial(deepcopy, build) if isinstance(build, nn.Module) else build
        self.loss = loss or nn.CrossEntropyLoss(reduction="none")
        self.classifies = classifies
        with seeded_torch(0, "scratch"):
            self.module = deepcopy(self.build())
        self.device = torch.device("cpu")
        self.compute_type: torch.dtype | None = None
        self.join: Callable[[Sequence[Tensor]], Tensor] = flatten
        self.stack: Stack | None = None
        self.examined = False
        self._laid_out: tuple[Tensor, LayeredStack] | None = None  # for one evaluation
        self._list_tensors()
        # BatchNorm, and anything that keeps statistics of a batch
        self.mixes_examples = bool(self.averaged) or any(
            isinstance(m, _BatchNorm) for m in self.module.modules()
        )
        require(bool(self.params), "the model has no trainable parameters")

    def _list_tensors(self) -> None:
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.names = [n for n, p in self.module.named_parameters() if p.requires_grad]
        buffers = dict(self.module.named_buffers())
        averaged = [name for name, b in buffers.items() if b.is_floating_point()]
        kept = [name for name, b in buffers.items() if not b.is_floating_point()]
        self.averaged = [buffers[name] for name in averaged]
        self.kept = [buffers[name] for name in kept]
        self.buffer_names = [*averaged, *kept]
        # a forward pass may write to its buffers, or put others in their place: both are followed
        self.slots = [_slot(self.module, name) for name in self.buffer_names]

    def on(self, device: torch.device, precision: Precision) -> ModuleObjective:
        """A copy on the device; with bf16, layers compute in it and weights stay as they are."""
        moved = ModuleObjective(self.build, self.loss, self.classifies)
        moved.module.load_state_dict(self.module.state_dict())
        moved.device = device
        moved.module.to(device)
        moved.compute_type = torch.bfloat16 if precision == "bf16" else None
        moved._list_tensors()
        moved.mixes_examples = self.mixes_examples
        return moved

    @property
    def aligned(self) -> int:
        """What the length of `gradients`' rows should be a multiple of; what is behind is kept."""
        return 16 if self.device.type == "cuda" else 1

    def batching_pays(self, device: torch.device) -> bool:
        """Two to four times for dense layers on a CPU; grouped convolutions may be slower there."""
        convolves = any(isinstance(m, _ConvNd) for m in self.module.modules())
        return device.type != "cpu" or not convolves

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        with seeded_torch(seed, "initial weights"):
            module = self.build()
        params = flatten([p.detach() for p in module.parameters() if p.requires_grad])
        averaged = flatten([b for b in module.buffers() if b.is_floating_point()])
        kept = flatten([b.long() for b in module.buffers() if not b.is_floating_point()])
        buffers = Buffers(averaged.to(self.device), kept.long().to(self.device))
        return params.to(self.device), buffers

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        self.module.train()
        return self._gradient(params, buffers, batch)

    def _gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        self._bind(params, buffers)
        with self._autocast():
            output = self.module(batch["x"])
        loss = self._losses(output.to(params.dtype), batch["y"]).mean()
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        filled = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.params, strict=True)
        ]
        return self.join(filled), self._buffers() if self.slots else buffers

    @torch.no_grad()
    def detect_mixing(self, params: Tensor, buffers: Buffers, batch: Batch) -> None:
        """Note it where an example's output depends on the others of its batch."""
        self._bind(params, buffers)
        self.module.eval()
        # in full precision: coarser products of one example and of two differ by themselves
        with arithmetic("float32"):
            alone, together = self.module(batch["x"][:1]), self.module(batch["x"][:2])[:1]
        self.mixes_examples |= not torch.allclose(alone, together, rtol=1e-3, atol=1e-5)

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        counted = valid.to(params.dtype) / valid.sum(dim=1, keepdim=True)
        stack = self._examined_stack(params, buffers, batch, counted)
        if stack is not None:
            return stack.gradients(params, batch["x"], batch["y"], counted), buffers
        self.module.train()
        return self._mapped_gradients(params, buffers, batch, counted)

    def layered(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> LayeredStack | None:
        """Gradients of parameters that lie layer by layer, for models of stacked layers."""
        counted = valid.to(params.dtype) / valid.sum(dim=1, keepdim=True)
        stack = self._examined_stack(params, buffers, batch, counted)
        return None if stack is None else LayeredStack(stack, params)

    def _examined_stack(
        self, params: Tensor, buffers: Buffers, batch: Batch, counted: Tensor
    ) -> Stack | None:
        """The stacked form in training mode; whether there is one is found out once."""
        if not self.examined and len(params) > 1:  # of one client nothing could be mixed up
            self.stack, self.examined = self._checked_stack(params, buffers, batch), True
            if self.stack is not None:
                self.stack.compile(params, batch["x"], batch["y"], counted)
        if self.stack is not None:
            self.stack.module.train()
        return self.stack

    def _mapped_gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, counted: Tensor
    ) -> tuple[Tensor, Buffers]:
        """By `torch.func`: slower than stacked layers, but it knows every layer."""
        one_client = torch.func.grad(self._functional_loss, has_aux=True)
        each = torch.func.vmap(one_client, randomness="different")
        return each(params, buffers, batch["x"], batch["y"], counted)

    def _functional_loss(
        self, params: Tensor, buffers: Buffers, x: Tensor, y: Tensor, weights: Tensor
    ) -> tuple[Tensor, Buffers]:
        """The loss of one client without touching the module, for `torch.func`."""
        # vmap knows no other order of memory than the plain one
        plain = torch.contiguous_format
        mine = [piece.clone(memory_format=plain) for piece in pieces(params, self.params)]
        state = dict(zip(self.names, mine, strict=True))
        # BatchNorm writes to its buffers, and under vmap only contiguous ones remember it
        averaged = [piece.clone() for piece in pieces(buffers.averaged, self.averaged)]
        kept = [p.to(t.dtype, copy=True) for p, t in self._typed(buffers.kept)]
        state |= dict(zip(self.buffer_names, [*averaged, *kept], strict=True))
        with self._autocast():
            output = torch.func.functional_call(self.module, state, (x,))
        after = (
            self._gathered([state[name] for name in self.buffer_names]) if self.slots else buffers
        )
        return (self._losses(output.to(params.dtype), y) * weights).sum(), after

    def _checked_stack(self, params: Tensor, buffers: Buffers, batch: Batch) -> Stack | None:
        """The stacked form, where there is one that agrees with the loop."""
        computes, self.compute_type = self.compute_type, None
        try:
            self.module.eval()
            alone: Alone = lambda p, b: self._gradient(p, buffers, b)[0]  # noqa: E731
            stacks = not self.mixes_examples and can_stack(
                self.module, self._losses, alone, params, batch
            )
        finally:
            self.compute_type = computes
        fuse = params.is_cuda and len(self.params) <= FUSED_WEIGHTS
        return Stack(self.module, self._losses, computes, fuse) if stacks else None

    @torch.no_grad()
    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        output = self._predictions(params, buffers, batch["x"]).to(params.dtype)
        values = {"loss": self._losses(output, batch["y"])}
        if self.classifies:
            values["accuracy"] = (output.argmax(dim=1) == batch["y"]).to(output.dtype)
        return values

    def _predictions(self, params: Tensor, buffers: Buffers, x: Tensor) -> Tensor:
        if self.stack is not None and x.is_cuda:  # its layers are the faster ones there
            self.stack.module.eval()
            if self._laid_out is None or self._laid_out[0] is not params:
                self._laid_out = params, LayeredStack(self.stack, params[None])
            return self._laid_out[1].outputs(x)
        self._bind(params, buffers)
        self.module.eval()
        with self._autocast():
            return self.module(x)

    def load(self, params: Tensor, buffers: Buffers) -> nn.Module:
        """A module of its own with these parameters and buffers: the trained model."""
        self._bind(params.clone(), buffers)
        return deepcopy(self.module)

    def _autocast(self) -> AbstractContextManager[None]:
        if self.compute_type is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_type)

    def _losses(self, output: Tensor, y: Tensor) -> Tensor:
        """A loss for every example; losses of several outputs are averaged."""
        losses = self.loss(output, y)
        require(
            losses.ndim >= 1 and len(losses) == len(y),
            "the loss must give a value for every example; build it with reduction='none'",
        )
        return losses if losses.ndim == 1 else losses.flatten(1).mean(dim=1)

    def _bind(self, params: Tensor, buffers: Buffers) -> None:
        unflatten_into(self.params, params)
        averaged = pieces(
            buffers.averaged.clone(), self.averaged
        )  # the forward pass writes to them
        kept = [piece.to(t.dtype, copy=True) for piece, t in self._typed(buffers.kept)]
        for (home, name), value in zip(self.slots, [*averaged, *kept], strict=True):
            home[name] = value

    def _typed(self, kept: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(pieces(kept, self.kept), self.kept, strict=True))

    def _buffers(self) -> Buffers:
        return self._gathered([home[name].detach() for home, name in self.slots])

    def _gathered(self, values: Sequence[Tensor]) -> Buffers:
        averaged, kept = values[: len(self.averaged)], values[len(self.averaged) :]
        return Buffers(flatten(averaged), flatten([value.long() for value in kept]).long())


def _slot(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a buffer is kept: the dictionary of its module, and its name there."""
    owner, _, own = name.rpartition(".")
    return module.get_submodule(owner)._buffers, own
