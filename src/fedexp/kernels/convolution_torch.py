"""Convolutions of K clients, each with its own weights, in plain PyTorch; scaled operands.

Images are [K * B, C, H, W], weights [K, O, C, KH, KW]. `PerClient` and `Unfold` compute the same;
which is faster depends on the device and on the sizes (`Geometry`).

The second half converts float32 to half precision times a power of two per client, the operands
that tensor cores multiply fastest. tf32 and half precision have the same ten bits of mantissa, so
products lose no more; half precision takes half the time to read, is multiplied at twice the rate,
and in any memory order. It lacks range. So the largest number of a client is brought to between
2**14 and 2**15, and everything down to 2**-28 times that keeps ten bits. Below, numbers are off by
at most 2**-39 of the largest. (For a client whose largest is below 2**-112: by at most 2**-151.)
Every client has its own power of two, so that one that diverges does not blur the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from fedexp.kernels.launch import has_triton


@dataclass(frozen=True)
class Geometry:
    """K clients, each with B images of C channels and weights of its own; square stride, no groups.

    >>> Geometry(clients=2, batch=3, channels=4, height=8, width=8, outputs=5, kernel_height=3,
    ...          kernel_width=3, stride=2, padding=1).out_height
    4
    """

    clients: int
    batch: int
    channels: int
    height: int
    width: int
    outputs: int
    kernel_height: int
    kernel_width: int
    stride: int = 1
    padding: int = 0

    @property
    def out_height(self) -> int:
        return (self.height + 2 * self.padding - self.kernel_height) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width + 2 * self.padding - self.kernel_width) // self.stride + 1

    @property
    def transposed(self) -> Geometry:
        """The sizes of the convolution that computes the input gradient; for stride 1."""
        window = (self.kernel_height, self.kernel_width)
        images = (self.outputs, self.out_height, self.out_width)
        sizes = (self.clients, self.batch, *images, self.channels, *window)
        return Geometry(*sizes, 1, self.kernel_height - 1 - self.padding)

    @property
    def flops(self) -> int:
        """The number of multiplications and additions of one direction."""
        window = self.kernel_height * self.kernel_width * self.channels
        pixels = self.clients * self.batch * self.out_height * self.out_width
        return 2 * pixels * window * self.outputs


class PerClient:
    """One library call per client; for CPUs, and where no kernel of ours applies."""

    def forward(self, x: Tensor, w: Tensor, g: Geometry) -> Tensor:
        if g.clients == 1:
            return F.conv2d(x, w[0], stride=g.stride, padding=g.padding)
        return torch.cat(
            [
                F.conv2d(images, weight, stride=g.stride, padding=g.padding)
                for images, weight in zip(x.split(g.batch), w, strict=True)
            ]
        )

    def input_gradient(self, dy: Tensor, w: Tensor, g: Geometry) -> Tensor:
        shape = [g.batch, g.channels, g.height, g.width]
        return torch.cat(
            [
                conv2d_input(shape, weight, grad, g.stride, g.padding)
                for grad, weight in zip(dy.split(g.batch), w, strict=True)
            ]
        )

    def weight_gradient(self, dy: Tensor, x: Tensor, g: Geometry) -> Tensor:
        shape = [g.outputs, g.channels, g.kernel_height, g.kernel_width]
        return torch.stack(
            [
                conv2d_weight(images, shape, grad, g.stride, g.padding)
                for grad, images in zip(dy.split(g.batch), x.split(g.batch), strict=True)
            ]
        )


class Unfold:
    """im2col, then one matrix product per client; for few channels."""

    def forward(self, x: Tensor, w: Tensor, g: Geometry) -> Tensor:
        y = torch.bmm(_windows(x, g), _matrices(w).transpose(1, 2))
        return _as_images(y, g.outputs, g.out_height, g.out_width)

    def input_gradient(self, dy: Tensor, w: Tensor, g: Geometry) -> Tensor:
        columns = torch.bmm(_as_rows(dy, g.clients), _matrices(w))
        window = (g.kernel_height, g.kernel_width)
        # F.fold wants [N, C * KH * KW, pixels]
        by_image = columns.view(g.clients * g.batch, -1, *window, g.channels)
        by_image = by_image.permute(0, 4, 2, 3, 1).flatten(1, 3)
        size = (g.height, g.width)
        return F.fold(by_image, size, window, padding=g.padding, stride=g.stride)

    def weight_gradient(self, dy: Tensor, x: Tensor, g: Geometry) -> Tensor:
        dw = torch.bmm(_as_rows(dy, g.clients).transpose(1, 2), _windows(x, g))
        window = (g.kernel_height, g.kernel_width)
        return dw.unflatten(2, (*window, g.channels)).movedim(-1, -3)


def _windows(x: Tensor, g: Geometry) -> Tensor:
    """Return the window of each output pixel, [K, B * OH * OW, KH * KW * C]."""
    p, s = g.padding, g.stride
    rows = F.pad(x.permute(0, 2, 3, 1), (0, 0, p, p, p, p))
    windows = rows.unfold(1, g.kernel_height, s).unfold(2, g.kernel_width, s)
    return windows.movedim(3, -1).reshape(g.clients, g.batch * g.out_height * g.out_width, -1)


def _matrices(w: Tensor) -> Tensor:
    """Return weights as matrices [K, O, KH * KW * C]."""
    return w.movedim(2, -1).flatten(2)


def _as_rows(images: Tensor, clients: int) -> Tensor:
    """Return images as rows [K, pixels, channels]."""
    return images.permute(0, 2, 3, 1).reshape(clients, -1, images.shape[1])


def _as_images(rows: Tensor, channels: int, height: int, width: int) -> Tensor:
    """Return rows [K, pixels, channels] as images."""
    return rows.reshape(-1, height, width, channels).permute(0, 3, 1, 2)


Units = tuple[Tensor, Tensor]  # inverse scales of the two operands, [K] each

TARGET = 14 + 127 + 127  # minus the biased exponent of the largest number: that of its scale
LARGEST_EXPONENT = 253  # of a scale, so that its inverse is a normal number
FEW_CHANNELS = 16  # with fewer, tensor cores would mostly multiply padding
LARGEST_WINDOW = 128  # taps times channels that fit one gather


def takes_scaled(x: Tensor, g: Geometry) -> bool:
    """Return whether the float32 operands are scaled: for many clients, where tf32 is allowed.

    With few channels, as in a first layer, writing the result takes most of the time, and nothing
    is scaled.
    """
    if x.dtype != torch.float32 or not x.is_cuda or g.clients == 1:
        return False
    return torch.backends.cuda.matmul.allow_tf32 and has_triton() and not has_few_channels(g)


def has_few_channels(g: Geometry) -> bool:
    """Return whether taps and channels together are one short dimension (`convolution_few`)."""
    window = g.kernel_height * g.kernel_width * g.channels
    return g.channels < FEW_CHANNELS and window <= LARGEST_WINDOW


def result_type(operand: Tensor, units: Units | None) -> torch.dtype:
    """Return the type of a result: float32 for scaled operands, else that of the operands."""
    return operand.dtype if units is None else torch.float32


def scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers [K, n] scaled to half precision, and the unit that undoes the scale, [K]."""
    if rows.is_cuda and has_triton():
        from fedexp.kernels import convolution_triton

        return convolution_triton.scaled_half(rows)
    return plain_scaled_half(rows)


def plain_scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `scaled_half` does, in plain PyTorch.

    >>> half, unit = plain_scaled_half(torch.tensor([[1e-6, -3e-6], [2e8, 1.0]]))
    >>> half.dtype, (half.float() * unit[:, None]).tolist()[1]
    (torch.float16, [200015872.0, 1.0])
    """
    largest = rows.abs().amax(dim=1).view(torch.int32) >> 23  # its exponent; 255 if not finite
    exponent = (TARGET - largest).clamp(max=LARGEST_EXPONENT)
    exponent = torch.where(largest == 255, 127, exponent)
    scale, unit = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    return (rows * scale[:, None]).half(), unit


def scaled_images(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Return images [K * B, C, H, W] scaled to half precision, channels last, and units [K]."""
    last = x.permute(0, 2, 3, 1)
    half, unit = scaled_half(last.reshape(clients, -1))
    return half.view(last.shape).permute(0, 3, 1, 2), unit


def scaled_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [K, O, C, KH, KW] scaled to half precision, channels last, and units [K]."""
    last = w.movedim(2, -1)
    half, unit = scaled_half(last.flatten(1))
    return half.view(last.shape).movedim(-1, 2), unit
