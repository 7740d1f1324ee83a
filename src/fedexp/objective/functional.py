"""A module as a pure function of its parameters and buffers, which `torch.func.vmap` can batch.

The module's own forward is called with other tensors in the slots of its parameters and buffers,
so every model that torch can trace is covered, with shared weights, modules that have two names and
buffers that forward replaces. Fused recurrent layers, which vmap does not support, are unrolled
step by step, and normalisation over examples is written out for half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Slot = tuple[dict[str, Any], str]


class FunctionalModule:
    """A module whose parameters and buffers are arguments.

    `torch.func.functional_call` does not restore a module that has two names.

    Args:
        module: the model; it is left as it is after every call.
        names: the parameters and buffers that are arguments, in their order; the rest does not
            change.
        mixed: whether layers compute in half precision with weights of full precision.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], mixed: bool = False) -> None:
        self.module, self._mixed = in_plain_operations(module, mixed), mixed
        named = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self._slots = [slots_of(self.module, named[name]) for name in names]

    def __call__(
        self, tensors: Sequence[Tensor], *inputs: Tensor, **keywords: Tensor
    ) -> tuple[Any, list[Tensor]]:
        """Return the output in training mode, and what it makes of the tensors."""
        self.module.train()
        before = [read(slots) for slots in self._slots]
        try:
            for slots, tensor in zip(self._slots, tensors, strict=True):
                put(slots, tensor)
            with self._attention():
                output = self.module(*inputs, **keywords)
            return output, [read(slots) for slots in self._slots]
        finally:
            for slots, tensor in zip(self._slots, before, strict=True):
                put(slots, tensor)

    def _attention(self) -> AbstractContextManager[None]:
        """Select attention in plain operations, since vmap runs fused ones client by client.

        Not with half precision, which those do not convert.
        """
        return nullcontext() if self._mixed else sdpa_kernel(SDPBackend.MATH)


def slots_of(module: nn.Module, tensor: Tensor) -> list[Slot]:
    """Return every slot of a module that holds a tensor, once, whatever its names."""
    homes = [home for layer in module.modules() for home in (layer._parameters, layer._buffers)]
    return [(home, name) for home in homes for name, value in home.items() if value is tensor]


def put(slots: Sequence[Slot], value: Tensor) -> None:
    """Put one tensor into all slots."""
    for home, name in slots:
        home[name] = value


def read(slots: Sequence[Slot]) -> Tensor:
    """Return the tensor in the slots."""
    home, name = slots[0]
    return home[name]


def in_plain_operations(module: nn.Module, mixed: bool = False) -> nn.Module:
    """Return the module itself, or a copy without the layers that vmap does not support.

    Args:
        module: the model.
        mixed: whether normalisation over the batch meets inputs of half precision, which it cannot
            differentiate under vmap.

    >>> type(in_plain_operations(nn.LSTM(2, 3))).__name__
    'PlainLSTM'
    >>> in_plain_operations(nn.Linear(2, 3)).__class__ is nn.Linear
    True
    """
    table = PLAIN_RECURRENT | PLAIN_NORMS if mixed else PLAIN_RECURRENT
    if not any(type(layer) in table for layer in module.modules()):
        return module
    copy = deepcopy(module)
    for layer in copy.modules():
        if type(layer) in table:
            layer.__class__ = table[type(layer)]
    return copy


Weights = Sequence[Any]  # tensors; None where a layer has none
Hidden = tuple[Tensor, ...]


def lstm_cell(gates: Tensor, weights: Weights, hidden: Hidden) -> Hidden:
    """Return (h, c) after one step of an LSTM.

    `gates` [B, 4 H] is the input's part; `weights` are W_hh, b_hh and a projection.
    """
    h, c = hidden
    gates = gates + F.linear(h, weights[0], weights[1])
    i, f, g, o = gates.chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if weights[2] is None else F.linear(h, weights[2])), c


def gru_cell(gates: Tensor, weights: Weights, hidden: Hidden) -> Hidden:
    """Return (h,) after one step of a GRU.

    The reset gate applies to the hidden state's part, its bias included.
    """
    (h,) = hidden
    inner = F.linear(h, weights[0], weights[1])
    (xr, xz, xn), (hr, hz, hn) = gates.chunk(3, dim=-1), inner.chunk(3, dim=-1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return (n + z * (h - n),)


def rnn_cell(gates: Tensor, weights: Weights, hidden: Hidden, relu: bool = False) -> Hidden:
    """Return (h,) after one step of an Elman network."""
    summed = gates + F.linear(hidden[0], weights[0], weights[1])
    return (summed.relu() if relu else summed.tanh(),)


class _Unrolled(nn.RNNBase):
    """The forward pass of a recurrent layer, one step after another, in plain operations."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        batched = input.dim() == 3
        x = input if batched else input.unsqueeze(1)
        x = x.transpose(0, 1) if batched and self.batch_first else x
        states = self._states(x, hx, batched)
        ends: list[Hidden] = []
        for layer in range(self.num_layers):
            results = [
                self._direction(x, layer, reverse, states[len(ends) + reverse])
                for reverse in self._directions
            ]
            x = torch.cat([out for out, _ in results], dim=-1)
            ends += [end for _, end in results]
            if self.dropout and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout, self.training)
        last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        if not batched:
            x, last = x.squeeze(1), tuple(state.squeeze(1) for state in last)
        elif self.batch_first:
            x = x.transpose(0, 1)
        return x, (last if self._parts == 2 else last[0])

    @property
    def _parts(self) -> int:
        return 2 if isinstance(self, nn.LSTM) else 1

    @property
    def _directions(self) -> range:
        return range(2 if self.bidirectional else 1)

    def _states(self, x: Tensor, hx: Any, batched: bool) -> list[Hidden]:
        """Return the hidden state of each layer and direction before the first step."""
        count = self.num_layers * len(self._directions)
        if hx is None:
            sizes = (self.proj_size or self.hidden_size, self.hidden_size)[: self._parts]
            parts = tuple(x.new_zeros(count, x.shape[1], size) for size in sizes)
        else:
            parts = tuple(hx) if self._parts == 2 else (hx,)
            parts = parts if batched else tuple(part.unsqueeze(1) for part in parts)
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    def _direction(
        self, x: Tensor, layer: int, reverse: int, hidden: Hidden
    ) -> tuple[Tensor, Hidden]:
        """Return the outputs of one layer in one direction, and its last hidden state."""
        end = f"l{layer}" + ("_reverse" if reverse else "")
        names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
        weights: Weights = [getattr(self, f"{name}_{end}", None) for name in names]
        w_ih, b_ih, *of_hidden = weights
        gates = F.linear(x, w_ih, b_ih).unbind(0)
        outputs = []
        for gate in reversed(gates) if reverse else gates:
            hidden = self._cell(gate, of_hidden, hidden)
            outputs.append(hidden[0])
        return torch.stack(outputs[::-1] if reverse else outputs), hidden

    @property
    def _cell(self) -> Callable[[Tensor, Weights, Hidden], Hidden]:
        if isinstance(self, nn.LSTM):
            return lstm_cell
        if isinstance(self, nn.GRU):
            return gru_cell
        return partial(rnn_cell, relu=self.nonlinearity == "relu")


class _PlainBatchNorm(_BatchNorm):
    """Normalisation over the batch in float32, in plain operations."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.numel() == input.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got {input}")
        axes = [0, *range(2, input.dim())]
        wide = input.float()
        mean, var = self.running_mean, self.running_var
        if self.training or mean is None or var is None:
            var, mean = torch.var_mean(wide, axes, correction=0)
            self._update_statistics(mean, var, input.numel() // input.shape[1])
        scale = torch.rsqrt(var + self.eps)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        normal = (wide - mean.view(shape)) * scale.view(shape)
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    def _update_statistics(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Update the running statistics as torch does: the variance without its bias."""
        if not self.training or not self.track_running_stats or self.running_mean is None:
            return
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + 1
        cumulative = 1 / self.num_batches_tracked.to(mean.dtype)
        share = cumulative if self.momentum is None else self.momentum
        unbiased = var.detach() * (count / max(1, count - 1))
        self.running_mean = self.running_mean + share * (mean.detach() - self.running_mean)
        self.running_var = self.running_var + share * (unbiased - self.running_var)


class _PlainInstanceNorm(_InstanceNorm):
    """Normalisation of every image in float32, in plain operations."""

    def forward(self, input: Tensor) -> Tensor:
        batched = input.dim() == self._get_no_batch_dim() + 1  # type: ignore[no-untyped-call]
        if self.track_running_stats or not batched:
            return super().forward(input)
        wide = input.float()
        var, mean = torch.var_mean(wide, list(range(2, input.dim())), correction=0, keepdim=True)
        normal = (wide - mean) * torch.rsqrt(var + self.eps)
        if self.weight is not None:
            shape = [1, -1, *[1] * (input.dim() - 2)]
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)


def _plain(
    variant: type[nn.Module], *kinds: type[nn.Module]
) -> dict[type[nn.Module], type[nn.Module]]:
    """Return a class for each kind of layer: the kind with the methods of `variant`."""
    return {kind: type(f"Plain{kind.__name__}", (variant, kind), {}) for kind in kinds}


PLAIN_RECURRENT = _plain(_Unrolled, nn.LSTM, nn.GRU, nn.RNN)
PLAIN_NORMS = {
    **_plain(_PlainBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    **_plain(_PlainInstanceNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
}
