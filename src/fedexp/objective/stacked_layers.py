"""A module for many clients at once: every layer takes the weights of all of them.

The examples of all clients form one batch, client after client. Layers without weights work on
that as they are; layers with weights are replaced by ones that know which rows are whose. What
remains is an ordinary model: its gradient with respect to the stacked weights is every client's own
gradient, and no transformation of functions is involved.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn

from fedexp.kernels.conv import convolve
from fedexp.kernels.dense import products
from fedexp.kernels.flatten import flatten_images
from fedexp.kernels.norm import group_norm
from fedexp.models.norm import GroupNormReLU


class CannotStackError(Exception):
    """Why a module has no stacked form."""


class StackedLinear(nn.Linear):
    """Weights [K, O, F]; rows [K * B, ..., F]."""

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda:
            rows = input.reshape(len(self.weight), -1, input.shape[-1])
            return products(rows, self.weight, self.bias).view(*input.shape[:-1], -1)
        columns = input.reshape(len(self.weight), -1, input.shape[-1]).transpose(1, 2)
        # weights first: so their gradient comes in the order in which they lie in memory
        if self.bias is None:
            product = torch.bmm(self.weight, columns)
        else:
            product = torch.baddbmm(self.bias[:, :, None], self.weight, columns)
        return product.transpose(1, 2).reshape(*input.shape[:-1], -1)


class StackedConv2d(nn.Conv2d):
    """Weights [K, O, C, KH, KW]; images [K * B, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        padding = self.padding[0]
        assert isinstance(padding, int)
        return convolve(input, self.weight, self.bias, self.stride[0], padding)


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
    """Nothing of it is a client's own; on a GPU, images are turned round by an operator."""

    def forward(self, input: Tensor) -> Tensor:
        whole = self.start_dim == 1 and self.end_dim == -1 and input.ndim == 4
        return flatten_images(input) if whole and input.is_cuda else super().forward(input)


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.GroupNorm: StackedGroupNorm,
    GroupNormReLU: StackedGroupNormReLU,
}
NORMS = (nn.GroupNorm,)


def stacked(module: nn.Module) -> nn.Module:
    """A copy whose layers take stacked weights, by the names of the module's own.

    >>> layer = stacked(nn.Linear(2, 1, bias=False))
    >>> weight = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # one of either client
    >>> torch.func.functional_call(layer, {"weight": weight}, (rows,)).flatten().tolist()
    [1.0, 4.0]
    """
    copy = deepcopy(module)
    named = list(copy.named_parameters(remove_duplicate=False))
    _check(len({id(p) for _, p in named}) == len(named), "layers share weights")
    _check(all(p.requires_grad for _, p in named), "some weights are frozen")
    _check(not list(copy.buffers()), "it has buffers")
    for layer in copy.modules():
        if type(layer) is nn.Flatten:
            layer.__class__ = StackedFlatten
        if list(layer.parameters(recurse=False)):
            _check(type(layer) in STACKED, f"{type(layer).__name__} has weights of its own kind")
            _check_settings(layer)
            layer.__class__ = STACKED[type(layer)]
    return copy


def computes_exactly(module: nn.Module, name: str) -> bool:
    """Whether a weight stays in full precision beside bf16: those of normalisations do."""
    return isinstance(module.get_submodule(name.rpartition(".")[0]), NORMS)


def _check_settings(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        square = len(set(layer.stride)) == len(set(layer.padding)) == 1
        plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
        _check(
            square and plain and not isinstance(layer.padding, str), "a convolution is not plain"
        )


def _check(holds: bool, reason: str) -> None:
    if not holds:
        raise CannotStackError(reason)
