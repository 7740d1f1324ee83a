"""Gradient buffers and the memory layout of parameters stored layer by layer."""

from __future__ import annotations

import torch

from fedexp.kernels.layers import Layers, gradient_buffer, gradient_buffers

LAYERS = Layers(3, (7, 9000, 16, 1))
SIZE = sum(LAYERS.sizes)


def test_blocks_cover_every_parameter_once() -> None:
    flat = torch.zeros(LAYERS.offsets[-1], dtype=torch.int64)
    for at, length, begin, client in LAYERS.blocks(torch.device("cpu"), 64).tolist():
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
