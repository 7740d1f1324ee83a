"""Recurrent layers in which every client has its own weights: LSTM, GRU and RNN.

`recurrent` is one layer in one direction. The products with the input, and those that give the
gradients of the weights, are one batched product over all time steps; only the product with the
hidden state is computed step by step. On a GPU a step of an LSTM or a GRU is one Triton kernel
forward and one backward (`recurrent_triton`); the loops in this file are their plain twins.

Tensors are [K, T, B, ...]: clients, time steps, examples. Hidden states before and after every step
are stored in one tensor [K, T + 1, B, H], so that the outputs, and the states before each step, are
views of it. Products are computed in the type of the input; gates and cell states in float32 or
wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import weight_gradient

Cell = Literal["lstm", "gru", "tanh", "relu"]
GATES: dict[Cell, int] = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


def recurrent(
    cell: Cell,
    x: Tensor,
    weights: Sequence[Tensor],
    h0: Tensor,
    c0: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs [K, T, B, H], the last hidden state [K, B, H], and an LSTM's cell state.

    Args:
        cell: "lstm", "gru", or the activation of a plain recurrent layer.
        x: the inputs, [K, T, B, F].
        weights: W_ih [K, G H, F], W_hh [K, G H, H] and maybe b_ih and b_hh [K, G H], in the order
            of gates of `nn.LSTM` and `nn.GRU`.
        h0: the initial hidden state, [K, B, H].
        c0: the initial cell state of an LSTM, [K, B, H].
        reverse: start at the last time step.

    >>> weights = torch.ones(2, 1, 1), torch.zeros(2, 1, 1)
    >>> y, h, _ = recurrent("relu", torch.ones(2, 3, 1, 1), weights, torch.zeros(2, 1, 1))
    >>> y.shape, h.flatten().tolist()
    (torch.Size([2, 3, 1, 1]), [1.0, 1.0])
    """
    w_ih, w_hh, *biases = weights
    b_ih, b_hh = biases or (None, None)
    differentiated = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, *weights, h0, c0)
    )
    steps = Steps(cell, x.shape[1], reverse, differentiated)
    arguments = (steps, x, w_ih, w_hh, b_ih, b_hh, h0, c0)
    return _Recurrence.apply(*arguments)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Steps:
    """The time steps of a recurrent layer, and where their states are stored.

    Attributes:
        cell: the kind of cell.
        count: the number of time steps T.
        reverse: whether the last one comes first.
        differentiated: whether a backward pass follows, which needs the gates.
    """

    cell: Cell
    count: int
    reverse: bool
    differentiated: bool

    def __iter__(self) -> Any:
        """Iterate over the time steps in the order of computation."""
        return iter(reversed(range(self.count)) if self.reverse else range(self.count))

    def before(self, t: int) -> int:
        """Return the slot of the state before step t, among T + 1."""
        return t + self.reverse

    def after(self, t: int) -> int:
        """Return the slot of the state after step t."""
        return t + (not self.reverse)

    @property
    def first(self) -> int:
        """The time step that is computed first."""
        return self.count - 1 if self.reverse else 0

    @property
    def last(self) -> int:
        """The time step that is computed last."""
        return 0 if self.reverse else self.count - 1

    def outputs(self, slots: Tensor) -> Tensor:
        """Return the states after each step: a view of [K, T + 1, B, H]."""
        return slots[:, : self.count] if self.reverse else slots[:, 1:]

    def inputs(self, slots: Tensor) -> Tensor:
        """Return the states before each step: a view of [K, T + 1, B, H]."""
        return slots[:, 1:] if self.reverse else slots[:, : self.count]


class _Recurrence(torch.autograd.Function):
    """A layer in one direction; states, and for the backward pass gates, are stored."""

    @staticmethod
    def forward(
        ctx: Any,
        steps: Steps,
        x: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None,
        b_hh: Tensor | None,
        h0: Tensor,
        c0: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        clients, count, batch, _ = x.shape
        hidden, wide = w_hh.shape[2], wider(x.dtype)
        products = torch.bmm(x.flatten(1, 2), w_ih.mT).view(clients, count, batch, -1)
        hs = x.new_empty(clients, count + 1, batch, hidden)
        hs[:, steps.before(steps.first)] = h0
        cs = gates = None
        if c0 is not None:
            cs = x.new_empty(hs.shape, dtype=wide)
            cs[:, steps.before(steps.first)] = c0
        if steps.differentiated and steps.cell in ("lstm", "gru"):
            gates = x.new_empty(clients, count, batch, 4 * hidden, dtype=wide)
        if _has_kernel(steps.cell, x):
            from fedexp.kernels import recurrent_triton

            recurrent_triton.forward(steps, products, w_hh, b_ih, b_hh, hs, cs, gates)
        else:
            plain_forward(steps, products, w_hh, b_ih, b_hh, hs, cs, gates)
        ctx.steps = steps
        ctx.save_for_backward(x, w_ih, w_hh, b_ih, b_hh, hs, cs, gates)
        ctx.set_materialize_grads(False)
        last = steps.after(steps.last)
        return steps.outputs(hs), hs[:, last], None if cs is None else cs[:, last].to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, w_ih, w_hh, b_ih, b_hh, hs, cs, gates = ctx.saved_tensors
        steps, needed, wide = ctx.steps, ctx.needs_input_grad, wider(x.dtype)
        dy = x.new_zeros(*x.shape[:3], hs.shape[3]) if dy is None else dy.contiguous()
        # the gradients that pass from step to step besides those of the gates
        state = hs.new_zeros(x.shape[0], x.shape[2], hs.shape[3], dtype=wide)
        if steps.cell == "lstm":
            if dc is not None:
                state.copy_(dc)
            if dh is not None:
                dy = dy.clone()
                dy[:, steps.last] += dh
        elif dh is not None:
            state.copy_(dh)
        run = plain_backward
        if _has_kernel(steps.cell, x):
            from fedexp.kernels import recurrent_triton

            run = recurrent_triton.backward
        dgates, dhidden = run(steps, dy, w_hh, hs, cs, gates, state)
        by_input, by_hidden = dgates.flatten(1, 2), dhidden.flatten(1, 2)
        dx = torch.bmm(by_input, w_ih).view(x.shape) if needed[1] else None
        dw_ih = weight_gradient(by_input, x.flatten(1, 2), w_ih) if needed[2] else None
        before = steps.inputs(hs).flatten(1, 2)
        dw_hh = weight_gradient(by_hidden, before, w_hh) if needed[3] else None
        db_ih = by_input.sum(dim=1, dtype=b_ih.dtype) if needed[4] else None
        db_hh = db_ih
        if needed[5] and (dgates is not dhidden or db_ih is None):
            db_hh = by_hidden.sum(dim=1, dtype=b_hh.dtype)
        dh0 = dc0 = None
        if needed[6]:
            dh0 = torch.bmm(dhidden[:, steps.first], w_hh)
            dh0 = dh0 if steps.cell == "lstm" else (dh0 + state).to(x.dtype)
        if needed[7]:
            dc0 = state.to(x.dtype)
        return None, dx, dw_ih, dw_hh, db_ih, db_hh if needed[5] else None, dh0, dc0


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the type of gates and cell states: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def plain_forward(
    steps: Steps,
    products: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    hs: Tensor,
    cs: Tensor | None,
    gates: Tensor | None,
) -> None:
    """Compute all steps in plain PyTorch; write hidden and cell states, and gates where given.

    Args:
        products: the inputs times W_ih, [K, T, B, G H].
        hs, cs: hidden and cell states [K, T + 1, B, H]; the first slot is read.
        gates: of an LSTM the activated i, f, g and o; of a GRU r, z, n and the hidden part of n,
            [K, T, B, 4 H].
    """
    wide, w, cell = wider(products.dtype), w_hh.mT, steps.cell
    inputs = products.to(wide)
    if b_ih is not None and b_hh is not None:
        bias = b_ih if cell == "gru" else b_ih + b_hh
        inputs = inputs + bias[:, None, None].to(wide)
    for t in steps:
        before, after = steps.before(t), steps.after(t)
        h = hs[:, before]
        if cell == "gru":
            part = torch.bmm(h, w).to(wide)
            part = part if b_hh is None else part + b_hh[:, None].to(wide)
            (i_r, i_z, i_n), (h_r, h_z, h_n) = inputs[:, t].chunk(3, -1), part.chunk(3, -1)
            r, z = (i_r + h_r).sigmoid_(), (i_z + h_z).sigmoid_()
            n = (i_n + r * h_n).tanh_()
            hs[:, after] = n + z * (h.to(wide) - n)
            if gates is not None:
                torch.cat([r, z, n, h_n], dim=-1, out=gates[:, t])
            continue
        if wide == h.dtype:
            total = torch.baddbmm(inputs[:, t], h, w)
        else:
            total = inputs[:, t] + torch.bmm(h, w)
        if cell == "lstm":
            assert cs is not None
            i, f, g, o = total.chunk(4, dim=-1)
            i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
            c = torch.addcmul(f * cs[:, before], i, g)
            cs[:, after] = c
            hs[:, after] = o * c.tanh_()
            if gates is not None:
                gates[:, t] = total
        else:
            hs[:, after] = total.tanh_() if cell == "tanh" else total.relu_()


def plain_backward(
    steps: Steps,
    dy: Tensor,
    w_hh: Tensor,
    hs: Tensor,
    cs: Tensor | None,
    gates: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all gates by their input and their hidden part, [K, T, B, G H].

    The two are one tensor except for a GRU.

    Args:
        dy: the gradient of the outputs, [K, T, B, H].
        state: the gradient of the last cell state of an LSTM, else of the last hidden state,
            [K, B, H]; overwritten by that of the first, of a GRU or an RNN without what passes
            through W_hh.
    """
    cell, (*sizes, hidden) = steps.cell, dy.shape
    dgates = dy.new_empty(*sizes, GATES[cell] * hidden)
    dhidden = torch.empty_like(dgates) if cell == "gru" else dgates
    later: Tensor | None = None  # the gradients of the hidden part of the step computed before
    for t in reversed(list(steps)):
        before, after = steps.before(t), steps.after(t)
        dh = dy[:, t].to(state.dtype)
        if later is not None:
            dh = dh + torch.bmm(later, w_hh)
        if cell == "lstm":
            assert cs is not None
            assert gates is not None
            i, f, g, o = gates[:, t].chunk(4, dim=-1)
            tanh = cs[:, after].tanh()
            state += dh * o * (1 - tanh * tanh)
            parts = [
                state * g * i * (1 - i),
                state * cs[:, before] * f * (1 - f),
                state * i * (1 - g * g),
                dh * tanh * o * (1 - o),
            ]
            state *= f
            dgates[:, t] = torch.cat(parts, dim=-1)
        elif cell == "gru":
            assert gates is not None
            r, z, n, h_n = gates[:, t].chunk(4, dim=-1)
            dh = dh + state
            dn = dh * (1 - z) * (1 - n * n)
            dz = dh * (hs[:, before].to(state.dtype) - n) * z * (1 - z)
            dr = dn * h_n * r * (1 - r)
            torch.mul(dh, z, out=state)
            dgates[:, t] = torch.cat([dr, dz, dn], dim=-1)
            dhidden[:, t] = torch.cat([dr, dz, dn * r], dim=-1)
        else:
            dh = dh + state
            state.zero_()
            h = hs[:, after].to(state.dtype)
            dgates[:, t] = dh * (1 - h * h) if cell == "tanh" else dh * (h > 0)
        later = dhidden[:, t]
    return dgates, dhidden


def _has_kernel(cell: Cell, x: Tensor) -> bool:
    kinds = (torch.float32, torch.bfloat16)
    return cell in ("lstm", "gru") and x.is_cuda and x.dtype in kinds and has_triton()
