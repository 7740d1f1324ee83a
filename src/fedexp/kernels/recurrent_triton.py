"""Triton kernels of one time step of an LSTM or a GRU, for all clients.

A program computes a slice of the hidden units of one client for a block of its examples: the
product of the whole hidden state with the slice of W_hh of every gate, and then, without leaving
registers, gates and states. The weights of all clients fit the second-level cache of a large GPU,
so a step takes a few microseconds, most of it latency; hence slices are small and programs many.

Backward, the product runs over the gradients of all gates of the step computed before, which its
kernel has completed. Layouts are those of `recurrent`; tests compare with its plain twins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedexp.kernels.launch import launch

if TYPE_CHECKING:
    from fedexp.kernels.recurrent import Steps

UNITS = 16  # hidden units of a program; the least that tensor cores take
MOST_EXAMPLES = 64  # of a program
FORWARD_DEPTH, BACKWARD_DEPTH = 64, 128  # terms of a product per iteration
WARPS, STAGES = 4, 3


@triton.jit
def _tanh(x):
    """Return tanh(x) by an exponential that cannot overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def _sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x < 0, e, 1.0) / (1.0 + e)


@triton.jit
def _block(B, H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the client of a program, its examples and hidden units, and which of them exist."""
    client = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    return client, row, unit, (row < B)[:, None] & (unit < H)[None, :]


@triton.jit
def _rows(pointer, row, column, width, B, LAST: tl.constexpr):
    """Load a block of a matrix [B, width], zero outside of B rows and LAST columns."""
    mask = (row < B)[:, None] & (column < LAST)[None, :]
    return tl.load(pointer + row[:, None] * width + column[None, :], mask=mask, other=0.0)


@triton.jit
def _three_gates(pointer, row, unit, width, B, H: tl.constexpr):
    """Load the first three gates of a matrix [B, width] in float32."""
    one = _rows(pointer, row, unit, width, B, H).to(tl.float32)
    two = _rows(pointer + H, row, unit, width, B, H).to(tl.float32)
    return one, two, _rows(pointer + 2 * H, row, unit, width, B, H).to(tl.float32)


@triton.jit
def _store_three_gates(at, one, two, three, mask, H: tl.constexpr):
    """Store three gates, in the type of the memory."""
    tl.store(at, one, mask=mask)
    tl.store(at + H, two, mask=mask)
    tl.store(at + 2 * H, three, mask=mask)


@triton.jit
def _bias(pointer, unit, H: tl.constexpr):
    return tl.load(pointer + unit, mask=unit < H, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _hidden_products(hidden, w, row, unit, B, H: tl.constexpr, GATES: tl.constexpr,
                     BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
                     PRECISION: tl.constexpr):  # fmt: skip
    """Return the hidden states [B, H] times a slice of W_hh [GATES H, H]: four gates, or three."""
    one = tl.zeros((BLOCK_B, BLOCK_H), dtype=tl.float32)
    two, three, four = one, one, one
    for first in range(0, H, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        h = _rows(hidden, row, k, H, B, H)
        at = w + k[:, None] + unit[None, :] * H
        mask = (k < H)[:, None] & (unit < H)[None, :]
        weights = tl.load(at, mask=mask, other=0.0)
        one = tl.dot(h, weights, one, input_precision=PRECISION)
        weights = tl.load(at + H * H, mask=mask, other=0.0)
        two = tl.dot(h, weights, two, input_precision=PRECISION)
        weights = tl.load(at + 2 * H * H, mask=mask, other=0.0)
        three = tl.dot(h, weights, three, input_precision=PRECISION)
        if GATES == 4:
            weights = tl.load(at + 3 * H * H, mask=mask, other=0.0)
            four = tl.dot(h, weights, four, input_precision=PRECISION)
    return one, two, three, four


@triton.jit(do_not_specialize=["t", "before", "after", "T", "B"])
def _lstm_forward(
    products, w, b_ih, b_hh, hs, cs, gates, w_row, b_row, c_row, t, before, after, T, B,
    H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client, row, unit, mask = _block(B, H, BLOCK_B, BLOCK_H)
    hidden = hs + (client * (T + 1) + before) * B * H
    inputs = products + (client * T + t) * B * (4 * H)
    x_i, x_f, x_g = _three_gates(inputs, row, unit, 4 * H, B, H)
    x_o = _rows(inputs + 3 * H, row, unit, 4 * H, B, H).to(tl.float32)
    c = _rows(cs + (client * (T + 1) + before) * B * H, row, unit, H, B, H)
    i, f, g, o = _hidden_products(
        hidden, w + client * w_row, row, unit, B, H, 4, BLOCK_B, BLOCK_H, BLOCK_K, PRECISION
    )
    i += x_i
    f += x_f
    g += x_g
    o += x_o
    if BIAS:
        b_ih += client * b_row
        b_hh += client * c_row
        i += _bias(b_ih, unit, H) + _bias(b_hh, unit, H)
        f += _bias(b_ih + H, unit, H) + _bias(b_hh + H, unit, H)
        g += _bias(b_ih + 2 * H, unit, H) + _bias(b_hh + 2 * H, unit, H)
        o += _bias(b_ih + 3 * H, unit, H) + _bias(b_hh + 3 * H, unit, H)
    i, f, g, o = _sigmoid(i), _sigmoid(f), _tanh(g), _sigmoid(o)
    c = f * c + i * g
    state = (client * (T + 1) + after) * B * H + row[:, None] * H + unit[None, :]
    tl.store(cs + state, c, mask=mask)
    tl.store(hs + state, (o * _tanh(c)).to(hs.dtype.element_ty), mask=mask)
    if STORE:
        at = gates + (client * T + t) * B * (4 * H) + row[:, None] * (4 * H) + unit[None, :]
        _store_three_gates(at, i, f, g, mask, H)
        tl.store(at + 3 * H, o, mask=mask)


@triton.jit
def _through_weights(
    dgates, w, row, unit, B, H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the gradients of gates [B, WIDTH] times W_hh [WIDTH, slice of H]."""
    total = tl.zeros((BLOCK_B, BLOCK_H), dtype=tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        later = _rows(dgates, row, k, WIDTH, B, WIDTH)
        weight = _rows(w, k, unit, H, WIDTH, H)
        total = tl.dot(later, weight, total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=["t", "later", "before", "after", "T", "B"])
def _lstm_backward(
    dy, w, cs, gates, dgates, state, w_row, t, later, before, after, T, B,
    H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client, row, unit, mask = _block(B, H, BLOCK_B, BLOCK_H)
    own = gates + (client * T + t) * B * (4 * H)
    i, f, g = _three_gates(own, row, unit, 4 * H, B, H)
    o = _rows(own + 3 * H, row, unit, 4 * H, B, H)
    c = _rows(cs + (client * (T + 1) + before) * B * H, row, unit, H, B, H)
    tanh = _tanh(_rows(cs + (client * (T + 1) + after) * B * H, row, unit, H, B, H))
    dc = _rows(state + client * B * H, row, unit, H, B, H)
    dh = _rows(dy + (client * T + t) * B * H, row, unit, H, B, H).to(tl.float32)
    if not FIRST:
        dh += _through_weights(
            dgates + (client * T + later) * B * (4 * H), w + client * w_row, row, unit, B,
            H, 4 * H, BLOCK_B, BLOCK_H, BLOCK_K, PRECISION,
        )  # fmt: skip
    dc += dh * o * (1.0 - tanh * tanh)
    at = dgates + (client * T + t) * B * (4 * H) + row[:, None] * (4 * H) + unit[None, :]
    di, df, dg = dc * g * i * (1.0 - i), dc * c * f * (1.0 - f), dc * i * (1.0 - g * g)
    _store_three_gates(at, di, df, dg, mask, H)
    tl.store(at + 3 * H, dh * tanh * o * (1.0 - o), mask=mask)
    tl.store(state + client * B * H + row[:, None] * H + unit[None, :], dc * f, mask=mask)


@triton.jit(do_not_specialize=["t", "before", "after", "T", "B"])
def _gru_forward(
    products, w, b_ih, b_hh, hs, gates, w_row, b_row, c_row, t, before, after, T, B,
    H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    BIAS: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client, row, unit, mask = _block(B, H, BLOCK_B, BLOCK_H)
    hidden = hs + (client * (T + 1) + before) * B * H
    inputs = products + (client * T + t) * B * (3 * H)
    r, z, n = _three_gates(inputs, row, unit, 3 * H, B, H)
    own = _rows(hidden, row, unit, H, B, H).to(tl.float32)
    h_r, h_z, h_n, _ = _hidden_products(
        hidden, w + client * w_row, row, unit, B, H, 3, BLOCK_B, BLOCK_H, BLOCK_K, PRECISION
    )
    if BIAS:
        b_ih += client * b_row
        b_hh += client * c_row
        r += _bias(b_ih, unit, H) + _bias(b_hh, unit, H)
        z += _bias(b_ih + H, unit, H) + _bias(b_hh + H, unit, H)
        n += _bias(b_ih + 2 * H, unit, H)
        h_n += _bias(b_hh + 2 * H, unit, H)
    r, z = _sigmoid(r + h_r), _sigmoid(z + h_z)
    n = _tanh(n + r * h_n)
    state = (client * (T + 1) + after) * B * H + row[:, None] * H + unit[None, :]
    tl.store(hs + state, (n + z * (own - n)).to(hs.dtype.element_ty), mask=mask)
    if STORE:
        at = gates + (client * T + t) * B * (4 * H) + row[:, None] * (4 * H) + unit[None, :]
        _store_three_gates(at, r, z, n, mask, H)
        tl.store(at + 3 * H, h_n, mask=mask)


@triton.jit(do_not_specialize=["t", "later", "before", "T", "B"])
def _gru_backward(
    dy, w, hs, gates, dgates, dhidden, state, w_row, t, later, before, T, B,
    H: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr,
    FIRST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    client, row, unit, mask = _block(B, H, BLOCK_B, BLOCK_H)
    own = gates + (client * T + t) * B * (4 * H)
    r, z, n = _three_gates(own, row, unit, 4 * H, B, H)
    h_n = _rows(own + 3 * H, row, unit, 4 * H, B, H)
    h = _rows(hs + (client * (T + 1) + before) * B * H, row, unit, H, B, H).to(tl.float32)
    dh = _rows(state + client * B * H, row, unit, H, B, H)
    dh += _rows(dy + (client * T + t) * B * H, row, unit, H, B, H).to(tl.float32)
    if not FIRST:
        dh += _through_weights(
            dhidden + (client * T + later) * B * (3 * H), w + client * w_row, row, unit, B,
            H, 3 * H, BLOCK_B, BLOCK_H, BLOCK_K, PRECISION,
        )  # fmt: skip
    dn = dh * (1.0 - z) * (1.0 - n * n)
    dz = dh * (h - n) * z * (1.0 - z)
    dr = dn * h_n * r * (1.0 - r)
    at = (client * T + t) * B * (3 * H) + row[:, None] * (3 * H) + unit[None, :]
    _store_three_gates(dgates + at, dr, dz, dn, mask, H)
    _store_three_gates(dhidden + at, dr, dz, dn * r, mask, H)
    tl.store(state + client * B * H + row[:, None] * H + unit[None, :], dh * z, mask=mask)


def forward(
    steps: Steps, products: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None,
    hs: Tensor, cs: Tensor | None, gates: Tensor | None,
) -> None:  # fmt: skip
    """Compute all steps, as `recurrent.plain_forward` does."""
    w_hh = w_hh if w_hh[0].is_contiguous() else w_hh.contiguous()
    biases = (w_hh, w_hh) if b_ih is None or b_hh is None else (b_ih, b_hh)
    grid, settings = _settings(hs, w_hh.shape[2], FORWARD_DEPTH)
    lstm = steps.cell == "lstm"
    states = (hs, cs) if lstm else (hs,)
    for t in steps:
        launch(
            _lstm_forward if lstm else _gru_forward, grid,
            products, w_hh, *biases, *states, products if gates is None else gates,
            w_hh.stride(0), *(b.stride(0) for b in biases), t, steps.before(t), steps.after(t),
            **settings, BIAS=b_ih is not None, STORE=gates is not None,
        )  # fmt: skip


def backward(
    steps: Steps, dy: Tensor, w_hh: Tensor, hs: Tensor, cs: Tensor | None, gates: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of all gates, as `recurrent.plain_backward` does."""
    w_hh = w_hh if w_hh[0].is_contiguous() else w_hh.contiguous()
    grid, settings = _settings(hs, 4 * w_hh.shape[2], BACKWARD_DEPTH)
    dgates = dy.new_empty(*dy.shape[:3], w_hh.shape[1])
    dhidden = dgates if steps.cell == "lstm" else torch.empty_like(dgates)
    later = None
    for t in reversed(list(steps)):
        settings["FIRST"] = later is None
        at = (w_hh.stride(0), t, t if later is None else later, steps.before(t))
        if steps.cell == "lstm":
            launch(
                _lstm_backward, grid,
                dy, w_hh, cs, gates, dgates, state, *at, steps.after(t), **settings,
            )  # fmt: skip
        else:
            launch(
                _gru_backward, grid, dy, w_hh, hs, gates, dgates, dhidden, state, *at, **settings
            )
        later = t
    return dgates, dhidden


def _settings(hs: Tensor, terms: int, depth: int) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Return the grid (clients, slices of units, blocks of examples) and the sizes of a launch."""
    clients, slots, batch, hidden = hs.shape
    block = min(MOST_EXAMPLES, max(16, triton.next_power_of_2(batch)))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    settings = {
        "T": slots - 1, "B": batch, "H": hidden, "BLOCK_B": block, "BLOCK_H": UNITS,
        "BLOCK_K": min(depth, max(16, triton.next_power_of_2(terms))),
        "PRECISION": "tf32" if tf32 else "ieee", "num_warps": WARPS, "num_stages": STAGES,
    }  # fmt: skip
    return (clients, -(-hidden // UNITS), -(-batch // block)), settings
