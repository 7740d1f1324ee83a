"""Recurrent layers of many clients: plain twin and kernels against torch's layers in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedexp.kernels.launch import has_triton
from fedexp.kernels.layers import gradient_buffers
from fedexp.kernels.recurrent import GATES, Cell, Steps, plain_backward, plain_forward, recurrent
from tests.helpers.kernels import CLIENTS, DEVICES, relative_error

# bf16 and tf32 round the operands of every time step
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-3, torch.bfloat16: 3e-2}
# time steps, batch, inputs, hidden units
SIZES = [(1, 1, 3, 4), (5, 4, 3, 8), (4, 20, 7, 23), (3, 70, 5, 40)]
needs_triton = pytest.mark.skipif(not has_triton(), reason="no GPU with Triton")


def layer_of(cell: Cell, inputs: int, hidden: int, bias: bool) -> nn.RNNBase:
    options: dict[str, Any] = {"bias": bias, "batch_first": True}
    if cell == "lstm":
        return nn.LSTM(inputs, hidden, **options).double()
    if cell == "gru":
        return nn.GRU(inputs, hidden, **options).double()
    return nn.RNN(inputs, hidden, nonlinearity=cell, **options).double()


def expected_results(
    cell: Cell, x: Tensor, weights: list[Tensor], states: list[Tensor], reverse: bool
) -> list[Tensor]:
    """Return outputs and last states by torch's layer, client by client."""
    results = []
    layer = layer_of(cell, x.shape[-1], states[0].shape[-1], len(weights) > 2)
    names = [name for name, _ in layer.named_parameters()]
    for own in range(len(x)):
        named = dict(zip(names, (w[own] for w in weights), strict=True))
        inputs = x[own].transpose(0, 1)
        first = [s[own][None] for s in states]
        inputs = inputs.flip(1) if reverse else inputs
        y, last = torch.func.functional_call(
            layer, named, (inputs, tuple(first) if cell == "lstm" else first[0])
        )
        y = y.flip(1) if reverse else y
        last = last if cell == "lstm" else (last,)
        results.append([y.transpose(0, 1), *(state[0] for state in last)])
    return [torch.stack(each) for each in zip(*results, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("cell", GATES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_recurrent_layer_and_gradients(
    dtype: torch.dtype,
    cell: Cell,
    sizes: tuple[int, int, int, int],
    bias: bool,
    reverse: bool,
    device: str,
) -> None:
    time, batch, inputs, hidden = sizes
    draw = torch.Generator().manual_seed(4)

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        value = scale * torch.randn(*shape, generator=draw)
        return value.to(device, dtype).requires_grad_()

    x, rows = drawn(CLIENTS, time, batch, inputs), GATES[cell] * hidden
    weights = [drawn(CLIENTS, rows, n, scale=n**-0.5) for n in (inputs, hidden)]
    weights += [drawn(CLIENTS, rows, scale=0.3) for _ in range(2 * bias)]
    states = [drawn(CLIENTS, batch, hidden, scale=0.5) for _ in range(1 + (cell == "lstm"))]
    leaves = [x, *weights, *states]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    ends = 1 + len(weights)
    expected = expected_results(cell, exact[0], exact[1:ends], exact[ends:], reverse)
    c0 = states[1] if cell == "lstm" else None
    results = recurrent(cell, x, weights, states[0], c0, reverse)
    found = [t for t in results if t is not None]
    pulls = [torch.randn(t.shape, generator=draw).to(device, dtype) for t in found]
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == dtype
        assert relative_error(value, wanted.detach()) < TOLERANCE[dtype]
    if cell == "relu" and dtype != torch.float64:
        return  # near 0 it has another slope after rounding
    grads = torch.autograd.grad(found, leaves, pulls)
    wanted_grads = torch.autograd.grad(expected, exact, [p.double() for p in pulls])
    for grad, wanted in zip(grads, wanted_grads, strict=True):
        assert relative_error(grad, wanted) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_weights_are_written_to_their_buffers(device: str) -> None:
    weights = [torch.randn(2, 12, 3, device=device), torch.randn(2, 12, 4, device=device)]
    weights = [w.requires_grad_() for w in weights]
    buffers = [torch.empty_like(w) for w in weights]
    x, h0 = torch.randn(2, 5, 3, 3, device=device), torch.zeros(2, 3, 4, device=device)
    expected = torch.autograd.grad(recurrent("gru", x, weights, h0)[0].sum(), weights)
    with gradient_buffers(weights, buffers):
        grads = torch.autograd.grad(recurrent("gru", x, weights, h0)[0].sum(), weights)
    for grad, buffer, wanted in zip(grads, buffers, expected, strict=True):
        assert grad.data_ptr() == buffer.data_ptr()
        torch.testing.assert_close(buffer, wanted)


def test_nothing_is_stored_without_a_backward_pass() -> None:
    weights = [torch.randn(2, 16, 3), torch.randn(2, 16, 4)]
    x, zeros = torch.randn(2, 5, 3, 3), torch.zeros(2, 3, 4)
    y, h, c = recurrent("lstm", x, weights, zeros, zeros)
    assert y.grad_fn is None
    torch.testing.assert_close(y[:, -1], h)
    assert c is not None


@needs_triton
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (3, 4, 8, 256), (2, 50, 8, 256)], ids=str)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_their_plain_twins(
    dtype: torch.dtype, cell: Cell, sizes: tuple[int, int, int, int], bias: bool, reverse: bool
) -> None:
    from fedexp.kernels import recurrent_triton

    time, batch, _, hidden = sizes
    steps = Steps(cell, time, reverse, differentiated=True)
    draw = torch.Generator("cuda").manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    rows = GATES[cell] * hidden
    products = drawn(CLIENTS, time, batch, rows).to(dtype)
    w = drawn(CLIENTS, 16 + rows * hidden).to(dtype)[:, 16:] * hidden**-0.5  # with gaps
    w = w.unflatten(1, (rows, hidden))
    b_ih, b_hh = (drawn(CLIENTS, rows).to(dtype) if bias else None for _ in range(2))
    dy, first = drawn(CLIENTS, time, batch, hidden).to(dtype), drawn(CLIENTS, batch, hidden)
    results = []
    for forward, backward in (
        (plain_forward, plain_backward),
        (recurrent_triton.forward, recurrent_triton.backward),
    ):
        hs = torch.zeros(CLIENTS, time + 1, batch, hidden, device="cuda", dtype=dtype)
        hs[:, steps.before(steps.first)] = first
        cs = None
        if cell == "lstm":
            cs = torch.zeros_like(hs, dtype=torch.float32)
            cs[:, steps.before(steps.first)] = first
        gates = torch.empty(CLIENTS, time, batch, 4 * hidden, device="cuda")
        state = first.clone()
        forward(steps, products, w, b_ih, b_hh, hs, cs, gates)
        dgates, dhidden = backward(steps, dy, w, hs, cs, gates, state)
        results.append([hs, gates, dgates, dhidden, state])
    for twin, kernel in zip(*results, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        assert relative_error(kernel, twin.double()) < tolerance
