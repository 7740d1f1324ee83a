"""A module with the weights of many clients: every layer takes the weights of all of them.

The examples of all clients form one batch, client after client. Layers without weights work on
that as they are; layers with weights are replaced by ones that know which rows are whose. What
remains is an ordinary model: its gradient with respect to the stacked weights is every client's own
gradient, and no function transform is involved.

`Stack` is the model, `StackedClients` the model with the parameters of K clients during local
training. Parameters are stored layer by layer, as `fedexp.kernels.layers` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedexp.data.federation import Batch
from fedexp.kernels.convolution import convolve, convolve_relu
from fedexp.kernels.dense import flatten_images, products
from fedexp.kernels.epilogue import Epilogue, epilogue, epilogue_of, has_hooks
from fedexp.kernels.launch import differentiable
from fedexp.kernels.layers import Layers, gradient_buffers
from fedexp.kernels.loss import cross_entropy
from fedexp.kernels.normalisation import group_norm
from fedexp.models import GroupNormReLU
from fedexp.objective.base import DEFAULT_FIELDS, Fields, as_type, shaped
from fedexp.objective.sequence_layers import STACKED_CONTAINERS, STACKED_SEQUENCE, unsupported


class CannotStackError(Exception):
    """Why a module has no stacked implementation."""


class StackedLinear(nn.Linear):
    """Weights [K, O, F]; rows [K * B, ..., F]."""

    def forward(self, input: Tensor) -> Tensor:
        return self.with_epilogue(input, Epilogue(), self.training)

    def with_epilogue(self, input: Tensor, what: Epilogue, training: bool) -> Tensor:
        rows = input.reshape(len(self.weight), -1, input.shape[-1])
        if input.is_cuda:
            product = products(rows, self.weight)
            result = epilogue(product, self.bias, what, training)
            return result.view(*input.shape[:-1], -1)
        columns = rows.transpose(1, 2)
        # weights first: so their gradient has the order of memory in which they are stored
        if self.bias is None:
            product = torch.bmm(self.weight, columns)
        else:
            product = torch.baddbmm(self.bias[:, :, None], self.weight, columns)
        result = epilogue(product.transpose(1, 2), None, what, training)
        return result.reshape(*input.shape[:-1], -1)


class StackedConv2d(nn.Conv2d):
    """Weights [K, O, C, KH, KW]; images [K * B, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        return self.with_epilogue(input, Epilogue(), self.training)

    def with_epilogue(self, input: Tensor, what: Epilogue, training: bool) -> Tensor:
        padding = self.padding[0]
        assert isinstance(padding, int)
        sizes = self.stride[0], padding
        if what.is_relu and self.bias is not None:
            result = convolve_relu(input, self.weight, self.bias, *sizes)
            if result is not None:
                return result
        product = convolve(input, self.weight, None, *sizes)
        return epilogue(product, self.bias, what, training)


class StackedGroupNorm(nn.GroupNorm):
    """Scale and shift [K, C]."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.weight, self.bias, self.num_groups, self.eps)


class StackedGroupNormReLU(GroupNormReLU):
    """Scale and shift [K, C], with the residual and the ReLU."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return group_norm(
            input, self.weight, self.bias, self.num_groups, self.eps, residual, relu=True
        )


class StackedFlatten(nn.Flatten):
    """On a GPU, images are permuted by a custom op; no weights."""

    def forward(self, input: Tensor) -> Tensor:
        whole = self.start_dim == 1 and self.end_dim == -1 and input.ndim == 4
        return flatten_images(input) if whole and input.is_cuda else super().forward(input)


class FusedSequential(nn.Sequential):
    """Layers do the work of the ReLU, pooling and dropout after them; indexed ones do not."""

    def forward(self, input: Any) -> Any:
        modules, at = list(self), 0
        while at < len(modules):
            layer, at = modules[at], at + 1
            if isinstance(layer, StackedLinear | StackedConv2d) and not has_hooks(layer):
                what = epilogue_of(modules[at:], images=isinstance(layer, StackedConv2d))
                at += what.follows  # to after the dropout, if any, which may have a mode of its own
                input = layer.with_epilogue(input, what, modules[at - 1].training)
            else:
                input = layer(input)
        return input


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.GroupNorm: StackedGroupNorm,
    GroupNormReLU: StackedGroupNormReLU,
    nn.modules.linear.NonDynamicallyQuantizableLinear: StackedLinear,
    **STACKED_SEQUENCE,
}
# of layers without weights of their own
CONTAINERS: dict[type[nn.Module], type[nn.Module]] = {nn.Flatten: StackedFlatten}
CONTAINERS |= STACKED_CONTAINERS
NORMS = (nn.GroupNorm, nn.LayerNorm)


def stacked(module: nn.Module, epilogues: bool = False) -> nn.Module:
    """Return a copy whose trained layers take stacked weights, by the names of the module's own.

    With `epilogues`, layers inside an `nn.Sequential` do the work of the ReLU, pooling and dropout
    that follow them (`fedexp.kernels.epilogue`).

    >>> layer = stacked(nn.Linear(2, 1, bias=False))
    >>> weight = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # one per client
    >>> torch.func.functional_call(layer, {"weight": weight}, (rows,)).flatten().tolist()
    [1.0, 4.0]
    """
    copy = deepcopy(module)
    named = list(copy.named_parameters(remove_duplicate=False))
    _check(len({id(p) for _, p in named}) == len(named), "layers share weights")
    _check(not list(copy.buffers()), "it has buffers")
    for layer in copy.modules():
        if type(layer) in CONTAINERS:
            layer.__class__ = CONTAINERS[type(layer)]
        trained = [p.requires_grad for p in layer.parameters(recurse=False)]
        if any(trained):  # a frozen layer is the same for all clients, and takes all rows as it is
            _check(all(trained), "some weights of a layer are frozen")
            _check(type(layer) in STACKED, f"{type(layer).__name__} cannot be stacked")
            _check((reason := unsupported(layer)) is None, str(reason))
            layer.__class__ = STACKED[type(layer)]
    if epilogues:
        for layer in copy.modules():
            if type(layer) is nn.Sequential:
                layer.__class__ = FusedSequential
    return copy


def computes_exactly(module: nn.Module, name: str) -> bool:
    """Return whether a weight stays in full precision beside bf16: those of normalisations do."""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), NORMS)


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise CannotStackError(reason)


Losses = Callable[[Any, Any], Tensor]


class Stack:
    """The loss of a module for many clients. Parameters are [K, d], fields of a batch [K, B, ...].

    Args:
        module: the model of one client.
        losses: a loss for every example of (outputs, targets).
        fields: the inputs and targets of a batch.
        ignored: the target that `losses` ignores if it is the plain cross-entropy; else None.
        compute_type: type in which layers compute; weights of normalisations stay in full
            precision.
    """

    def __init__(
        self,
        module: nn.Module,
        losses: Losses,
        fields: Fields = DEFAULT_FIELDS,
        compute_type: torch.dtype | None = None,
        ignored: int | None = None,
    ) -> None:
        on_gpu = any(p.is_cuda for p in module.parameters())
        self.ignored = ignored
        self.module, self.losses = stacked(module, epilogues=on_gpu), losses
        self.fields, self.compute_type = fields, compute_type
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.names, self.like = [name for name, _ in trained], [p for _, p in trained]
        if compute_type is not None:
            for name, weight in self.module.named_parameters():
                if not weight.requires_grad and not computes_exactly(module, name):
                    weight.data = weight.data.to(compute_type)
        self.exact = [computes_exactly(module, name) for name in self.names]

    def gradients(
        self, weights: Sequence[Tensor], batch: Batch, counted: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradient for each weight; None where the loss does not depend on it."""
        used = {name: batch[name] for name in self.fields.names}
        with torch.enable_grad():
            losses = self._losses_of(weights, used, counted.dtype)
            total = differentiable(_WeightedSum, losses, counted.flatten())
            return torch.autograd.grad(total, weights, allow_unused=True)

    def _losses_of(self, weights: Sequence[Tensor], batch: Batch, kind: torch.dtype) -> Tensor:
        """Return the loss of every example, client after client, [K * B]."""
        rows = {name: value.flatten(0, 1) for name, value in batch.items()}
        outputs, targets = self.forward(weights, rows), self.fields.targets(rows)
        are_tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
        if self.ignored is not None and are_tensors and outputs.ndim == 2 and targets.ndim == 1:
            return cross_entropy(outputs, targets, self.ignored, kind)
        return self.losses(as_type(outputs, kind), targets)

    def forward(self, weights: Sequence[Tensor], rows: Batch) -> Any:
        """Return the outputs of K models on K times as many examples, [K * B]."""
        if self.compute_type is not None:
            kind = self.compute_type
            rows = {n: v.to(kind) if v.is_floating_point() else v for n, v in rows.items()}
        return functional_call(
            self.module, dict(zip(self.names, weights, strict=True)), *self.fields.arguments(rows)
        )


class _WeightedSum(torch.autograd.Function):
    """A sum of losses of which only the gradient is used.

    Giving `torch.autograd.grad` the weights instead would import torch's symbolic shapes, which
    takes seconds.
    """

    @staticmethod
    def forward(ctx: Any, losses: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return losses.new_empty(())

    @staticmethod
    def backward(ctx: Any, ones: Tensor) -> tuple[Tensor, None]:
        (weights,) = ctx.saved_tensors
        return weights, None


class StackedClients:
    """K clients during local training: their parameters and gradients, layer by layer.

    Layers read the parameters in place, or a copy in the type in which they compute, and write
    gradients into the buffers from which the step reads them: nothing is gathered in between.

    Args:
        stack: the model of K clients.
        start: the initial parameters of all clients, [d], maybe with zeros behind them.
        clients: the number of clients K.
    """

    def __init__(self, stack: Stack, start: Tensor, clients: int) -> None:
        self.stack = stack
        self.layers = Layers(clients, tuple(weight.numel() for weight in stack.like))
        self.params = self.layers.pack(start)
        kind = stack.compute_type
        self.copy = None if kind is None else self.params.to(kind)
        self.grads = torch.zeros_like(self.params if self.copy is None else self.copy)

    def gradients(self, batch: Batch, counted: Tensor) -> Tensor:
        """Return the gradients layer by layer, overwritten by the next call; `counted` [K, B]."""
        weights = [w.detach().requires_grad_() for w in self._weights()]
        buffers = self._views(self.grads)
        # kernels write gradients without gaps
        dense = [s == n for s, n in zip(self.layers.strides, self.layers.sizes, strict=True)]
        offered = (list(compress(tensors, dense)) for tensors in (weights, buffers))
        with gradient_buffers(*offered) as written:
            grads = self.stack.gradients(weights, batch, counted)
            is_written = [weight.data_ptr() in written for weight in weights]
        _copy_into(buffers, grads, is_written)
        return self.grads

    def outputs(self, rows: Batch) -> Any:
        """Return the outputs of the K models on K times as many examples, [K * B]."""
        return self.stack.forward(self._weights(), rows)

    def losses(self, batch: Batch) -> Tensor:
        """Return the loss of every example of a batch [K, B, ...], client after client."""
        return self.stack._losses_of(self._weights(), batch, self.params.dtype)

    def _weights(self) -> list[Tensor]:
        whole = self._views(self.params)
        if self.copy is None:
            return whole
        pairs = zip(whole, self._views(self.copy), self.stack.exact, strict=True)
        return [full if exact else narrow for full, narrow, exact in pairs]

    def _views(self, flat: Tensor) -> list[Tensor]:
        pieces = zip(self.layers.views(flat), self.stack.like, strict=True)
        return [shaped(piece, like.shape) for piece, like in pieces]


def _copy_into(
    buffers: Sequence[Tensor], grads: Sequence[Tensor | None], is_written: Sequence[bool]
) -> None:
    """Copy the gradients that a kernel did not write into their buffers."""
    copied = []
    for grad, buffer, written in zip(grads, buffers, is_written, strict=True):
        if written and grad is not None:  # of a layer that was called twice
            buffer.add_(grad)
        elif grad is None and not written:
            buffer.zero_()
        elif grad is not None and grad.data_ptr() != buffer.data_ptr():
            copied.append((buffer, grad))
    if copied:
        torch._foreach_copy_([buffer for buffer, _ in copied], [grad for _, grad in copied])
