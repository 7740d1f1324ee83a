"""Parameters stored layer by layer: their layout, gradient buffers and SGD step.

The step is compared with the step on one vector per client.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedexp.kernels.layers import (
    Correction,
    Layers,
    clipped_lrs,
    gradient_buffer,
    gradient_buffers,
    sgd_step,
)
from fedexp.local import LocalTraining, local_step
from tests.helpers.kernels import DEVICES

LAYERS = Layers(3, (7, 9000, 16, 1))
SIZE = sum(LAYERS.sizes)
CLIP = 1.5


def test_blocks_cover_every_parameter_once() -> None:
    flat = torch.zeros(LAYERS.offsets[-1], dtype=torch.int64)
    for at, length, begin, client in LAYERS.blocks(64).tolist():
        assert length <= 64
        flat[at : at + length] += client * SIZE + torch.arange(begin, begin + length) + 1
    found = LAYERS.unpack(flat) - 1
    assert torch.equal(found, torch.arange(3 * SIZE).view(3, SIZE))


def test_buffers_are_offered_inside_the_block_only() -> None:
    weights = [torch.zeros(2, 3), torch.zeros(4)]
    buffers = [torch.ones(2, 3), torch.ones(4)]
    assert gradient_buffer(weights[0]) is None
    with gradient_buffers(weights, buffers):
        assert gradient_buffer(weights[0]) is buffers[0]
        assert gradient_buffer(weights[1].detach()) is buffers[1]
        assert gradient_buffer(buffers[0]) is None
    assert gradient_buffer(weights[0]) is None


def drawn(*shape: int, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prox", [0.0, 0.3])
@pytest.mark.parametrize("has_offset", [False, True])
def test_step_equals_the_step_on_one_vector_per_client(
    prox: float, has_offset: bool, device: str
) -> None:
    params, grads, offset = (drawn(3, SIZE, device=device, seed=seed) for seed in range(3))
    start = drawn(SIZE, device=device, seed=4)
    local = LocalTraining(weight_decay=0.1, clip_norm=CLIP)
    lr = torch.tensor(0.05, dtype=torch.float64, device=device)
    corrected = grads + prox * (params - start) + (offset if has_offset else 0)
    active = torch.tensor([True, False, True], device=device)
    expected = torch.where(active[:, None], local_step(params, corrected, lr, local), params)

    flat, flat_grads = LAYERS.pack(params), LAYERS.pack(grads)
    correction = Correction(prox, start, LAYERS.pack(offset) if has_offset else None)
    lrs = clipped_lrs(LAYERS, flat, flat_grads, correction, lr, CLIP)
    norms = corrected.square().sum(dim=1).sqrt()
    assert (norms > CLIP).all()
    torch.testing.assert_close(lrs, lr * CLIP / norms, rtol=1e-12, atol=0.0)
    decay = 1 - lr * local.weight_decay
    copy = flat.to(torch.bfloat16)
    sgd_step(LAYERS, flat, flat_grads, correction, lrs, decay, active, copy)
    torch.testing.assert_close(LAYERS.unpack(flat), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(copy, flat.to(torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_short_gradients_are_not_clipped_and_nan_stays_nan(device: str) -> None:
    grads = torch.zeros(3, SIZE, dtype=torch.float64, device=device)
    grads[1, 0], grads[2, 0] = CLIP / 2, torch.nan
    lr = torch.tensor(0.05, dtype=torch.float64, device=device)
    none = Correction(0.0, grads[0])
    lrs = clipped_lrs(LAYERS, LAYERS.pack(grads), LAYERS.pack(grads), none, lr, CLIP)
    assert lrs[:2].tolist() == [0.05, 0.05]
    assert lrs[2].isnan()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_gradients_do_not_reach_inactive_clients(device: str) -> None:
    params = drawn(3, SIZE, device=device, seed=0)
    grads = torch.full_like(params, torch.nan)
    flat = LAYERS.pack(params)
    lrs = torch.ones(3, dtype=torch.float64, device=device)
    active = torch.tensor([False, True, False], device=device)
    none = Correction(0.0, params[0])
    sgd_step(LAYERS, flat, LAYERS.pack(grads), none, lrs, lrs[0], active)
    after = LAYERS.unpack(flat)
    assert torch.equal(after[[0, 2]], params[[0, 2]])
    assert after[1].isnan().all()
