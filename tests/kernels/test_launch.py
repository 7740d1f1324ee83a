"""Operators: plain outside of compiled code, without `torch._dynamo`, and one op inside of it."""

from __future__ import annotations

import subprocess
import sys

import torch

from fedexp.kernels.convolution import convolve
from fedexp.kernels.dense import flatten_images, products

PROGRAM = """
import sys
import torch
from fedexp.kernels.convolution import convolve
from fedexp.kernels.dense import flatten_images, products
images, kernels = torch.randn(4, 3, 6, 6), torch.randn(2, 5, 3, 3, 3, requires_grad=True)
rows = flatten_images(convolve(images, kernels)).view(2, 2, -1)
weights = torch.randn(2, 7, rows.shape[-1], requires_grad=True)
products(rows, weights).sum().backward()
assert kernels.grad is not None and weights.grad is not None
print("torch._dynamo" in sys.modules)
"""


def test_operators_need_no_compiler() -> None:
    """Importing it takes seconds: most of the time until a first round."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_compiled_code_has_the_same_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 6, 6, generator=draw)
    kernels = torch.randn(2, 5, 3, 3, 3, generator=draw, requires_grad=True)
    weights = torch.randn(2, 7, 80, generator=draw, requires_grad=True)

    def loss(kernels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = flatten_images(convolve(images, kernels).relu()).view(2, 2, -1)
        return products(rows, weights).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    plain = torch.autograd.grad(loss(kernels, weights), (kernels, weights))
    other = torch.autograd.grad(compiled(kernels, weights), (kernels, weights))
    for one, two in zip(plain, other, strict=True):
        torch.testing.assert_close(one, two)
