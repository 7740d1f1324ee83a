"""A module as a pure function of its parameters and buffers, which `torch.func.vmap` can batch.

The module's own forward is called with other tensors in the slots of its parameters and buffers,
so every model that torch can trace is covered, with shared weights, modules that have two names and
buffers that forward replaces. Fused recurrent layers, which vmap does not support, are unrolled
step by step, and normalisation over examples computes in float32 beside half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Slot = tuple[dict[str, Any], str]


class FunctionalModule:
    """A module whose parameters and buffers are arguments.

    Args:
        module: the model; it is left as it is after every call.
        parameters: those that are arguments, in their order; the rest does not change.
        buffers: names of the buffers that are arguments, in their order.
        mixed: whether layers compute in half precision with weights of full precision.
    """

    def __init__(
        self,
        module: nn.Module,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[str],
        mixed: bool = False,
    ) -> None:
        self.module = in_plain_operations(module, mixed)
        where = dict(zip(module.parameters(), self.module.parameters(), strict=True))
        named = dict(self.module.named_buffers())
        self._parameters = [slots_of(self.module, where[p]) for p in parameters]
        self._buffers = [slots_of(self.module, named[name]) for name in buffers]
        self._mixed = mixed

    def __call__(
        self,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        *inputs: Tensor,
        **keywords: Tensor,
    ) -> tuple[Any, list[Tensor]]:
        """Return the output in training mode, and the buffers after it."""
        self.module.train()
        homes = [*self._parameters, *self._buffers]
        with _swapped(homes, [*parameters, *buffers]), self._attention():
            output = self.module(*inputs, **keywords)
            return output, [read(slots) for slots in self._buffers]

    def _attention(self) -> AbstractContextManager[None]:
        """Select attention in plain operations, since vmap runs fused ones client by client.

        Not with half precision, which those do not convert.
        """
        return nullcontext() if self._mixed else sdpa_kernel(SDPBackend.MATH)


def slots_of(module: nn.Module, tensor: Tensor) -> list[Slot]:
    """Return every slot of a module that holds a tensor, once, whatever its names."""
    homes = [home for layer in module.modules() for home in (layer._parameters, layer._buffers)]
    return [(home, name) for home in homes for name, value in home.items() if value is tensor]


def put(slots: Sequence[Slot], value: Tensor | None) -> None:
    """Put one tensor into all slots."""
    for home, name in slots:
        home[name] = value


def read(slots: Sequence[Slot]) -> Tensor:
    """Return the tensor in the slots."""
    home, name = slots[0]
    return home[name]


@contextmanager
def _swapped(homes: Sequence[Sequence[Slot]], values: Sequence[Tensor]) -> Iterator[None]:
    """Put tensors into their slots, and restore the previous ones at the end."""
    before = [read(slots) for slots in homes]
    try:
        for slots, value in zip(homes, values, strict=True):
            put(slots, value)
        yield
    finally:
        for slots, value in zip(homes, before, strict=True):
            put(slots, value)


def in_plain_operations(module: nn.Module, mixed: bool = False) -> nn.Module:
    """Return the module itself, or a copy whose layers all have a forward that vmap supports.

    Args:
        module: the model.
        mixed: whether normalisation over examples gets inputs of half precision, which torch cannot
            differentiate under vmap.

    >>> layer = nn.Linear(2, 3)
    >>> in_plain_operations(layer) is layer
    True
    """
    norms = (_BatchNorm, _InstanceNorm) if mixed else ()
    if not any(type(m) in RECURRENT or isinstance(m, norms) for m in module.modules()):
        return module
    copy = deepcopy(module)
    for layer in copy.modules():
        forward: Any = None
        if isinstance(layer, nn.RNNBase) and type(layer) in RECURRENT:
            forward = partial(_unrolled, layer)
        elif isinstance(layer, norms):
            forward = partial(_in_float32, layer.forward)
        if forward is not None:
            layer.forward = forward
    return copy


def _in_float32(forward: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Return the output of a layer that computes in float32, in the type of its input."""
    return forward(input.float()).to(input.dtype)


RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
Hidden = tuple[Tensor, ...]
Weights = Sequence[Any]  # tensors, or None for what a layer has not
Cell = Callable[[Tensor, Weights, Hidden], Hidden]


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


def _unrolled(layer: nn.RNNBase, input: Tensor, hx: Any = None) -> Any:
    """Return what a recurrent layer returns, one step after another, in plain operations."""
    batched = input.dim() == 3
    x = input if batched else input.unsqueeze(1)
    x = x.transpose(0, 1) if batched and layer.batch_first else x
    states = _first_states(layer, x, hx, batched)
    directions = 2 if layer.bidirectional else 1
    ends: list[Hidden] = []
    for number in range(layer.num_layers):
        results = [
            _direction(layer, x, number, reverse, states[len(ends) + reverse])
            for reverse in range(directions)
        ]
        x = torch.cat([outputs for outputs, _ in results], dim=-1)
        ends += [end for _, end in results]
        if layer.dropout and number + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout, layer.training)
    last = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
    if not batched:
        x, last = x.squeeze(1), tuple(part.squeeze(1) for part in last)
    elif layer.batch_first:
        x = x.transpose(0, 1)
    return x, (last if isinstance(layer, nn.LSTM) else last[0])


def _first_states(layer: nn.RNNBase, x: Tensor, hx: Any, batched: bool) -> list[Hidden]:
    """Return the hidden state of each layer and direction before the first step."""
    is_lstm = isinstance(layer, nn.LSTM)
    if hx is None:
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        sizes = (layer.proj_size or layer.hidden_size, layer.hidden_size)[: 1 + is_lstm]
        states = tuple(x.new_zeros(count, x.shape[1], size) for size in sizes)
    else:
        states = tuple(hx) if is_lstm else (hx,)
        states = states if batched else tuple(state.unsqueeze(1) for state in states)
    return list(zip(*(state.unbind(0) for state in states), strict=True))


def _direction(
    layer: nn.RNNBase, x: Tensor, number: int, reverse: int, hidden: Hidden
) -> tuple[Tensor, Hidden]:
    """Return the outputs of one layer in one direction, and its last hidden state."""
    end = f"l{number}" + ("_reverse" if reverse else "")
    names = ("weight_ih", "bias_ih", "weight_hh", "bias_hh", "weight_hr")
    of_inputs, bias, *of_hidden = cast(
        Weights, [layer._parameters.get(f"{n}_{end}") for n in names]
    )
    cells: dict[str, Cell] = {"LSTM": lstm_cell, "GRU": gru_cell}
    cell = cells.get(layer.mode) or partial(rnn_cell, relu=layer.mode == "RNN_RELU")
    gates = F.linear(x, of_inputs, bias).unbind(0)
    outputs = []
    for gate in reversed(gates) if reverse else gates:
        hidden = cell(gate, of_hidden, hidden)
        outputs.append(hidden[0])
    return torch.stack(outputs[::-1] if reverse else outputs), hidden
