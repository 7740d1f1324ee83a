"""Parameters layer by layer, and the step on them against the step on a vector for each client."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedexp.kernels.layers import Layers
from fedexp.kernels.step import Correction, move, sq_norms
from fedexp.local import LocalTraining, clip_to, local_step
from tests.kernels.test_twins import DEVICES

LAYERS = Layers(3, (7, 9000, 16, 1))
SIZE = sum(LAYERS.sizes)
CLIP = 1.5


def drawn(*shape: int, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def test_blocks_cover_every_parameter_once() -> None:
    flat = torch.zeros(LAYERS.offsets[-1], dtype=torch.int64)
    for at, length, begin, client in LAYERS.blocks(torch.device("cpu"), 64).tolist():
        assert length <= 64
        flat[at : at + length] += client * SIZE + torch.arange(begin, begin + length) + 1
    found = LAYERS.gather(flat) - 1
    assert torch.equal(found, torch.arange(3 * SIZE).view(3, SIZE))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pull", [0.0, 0.3])
@pytest.mark.parametrize("pushed", [False, True])
def test_step_is_that_of_plain_vectors(pull: float, pushed: bool, device: str) -> None:
    params, grads, push = (drawn(3, SIZE, device=device, seed=seed) for seed in range(3))
    start = drawn(SIZE, device=device, seed=4)
    local = LocalTraining(weight_decay=0.1, clip_norm=CLIP)
    lr = torch.tensor(0.05, dtype=torch.float64, device=device)
    corrected = grads + pull * (params - start) + (push if pushed else 0)
    active = torch.tensor([True, False, True], device=device)
    expected = torch.where(active[:, None], local_step(params, corrected, lr, local), params)

    flat, slopes = LAYERS.spread(params), LAYERS.spread(grads)
    correction = Correction(pull, start, LAYERS.spread(push) if pushed else None)
    squared = sq_norms(LAYERS, flat, slopes, correction)
    torch.testing.assert_close(squared, corrected.square().sum(dim=1))
    rates, keep = lr * clip_to(squared.sqrt(), CLIP), 1 - lr * local.weight_decay
    copy = flat.to(torch.bfloat16)
    move(LAYERS, flat, slopes, correction, rates, keep, active, copy)
    torch.testing.assert_close(LAYERS.gather(flat), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(copy, flat.to(torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_a_client_that_stays_is_not_touched_by_a_gradient_that_is_no_number(device: str) -> None:
    params = drawn(3, SIZE, device=device, seed=0)
    grads = torch.full_like(params, torch.nan)
    flat = LAYERS.spread(params)
    rates = torch.ones(3, dtype=torch.float64, device=device)
    active = torch.tensor([False, True, False], device=device)
    nothing = Correction(0.0, params[0])
    move(LAYERS, flat, LAYERS.spread(grads), nothing, rates, rates[0], active)
    after = LAYERS.gather(flat)
    assert torch.equal(after[[0, 2]], params[[0, 2]])
    assert after[1].isnan().all()
