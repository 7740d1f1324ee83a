"""Convolutions of many clients, each with weights of its own, in plain PyTorch.

Images are [K * B, C, H, W], weights [K, O, C, KH, KW]. Every form computes the same; which one is
fastest depends on the device and on the sizes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from fedexp.kernels.geometry import Geometry


class OneByOne:
    """A client at a time: what suits a CPU, and libraries that know no groups."""

    def forward(self, x: Tensor, w: Tensor, g: Geometry) -> Tensor:
        if g.clients == 1:
            return F.conv2d(x, w[0], stride=g.stride, padding=g.padding)
        return torch.cat(
            [
                F.conv2d(mine, own, stride=g.stride, padding=g.padding)
                for mine, own in zip(x.split(g.batch), w, strict=True)
            ]
        )

    def input_gradient(self, dy: Tensor, w: Tensor, g: Geometry) -> Tensor:
        shape = [g.batch, g.channels, g.height, g.width]
        return torch.cat(
            [
                conv2d_input(shape, own, mine, g.stride, g.padding)
                for mine, own in zip(dy.split(g.batch), w, strict=True)
            ]
        )

    def weight_gradient(self, dy: Tensor, x: Tensor, g: Geometry) -> Tensor:
        shape = [g.outputs, g.channels, g.kernel_height, g.kernel_width]
        return torch.stack(
            [
                conv2d_weight(images, shape, mine, g.stride, g.padding)
                for mine, images in zip(dy.split(g.batch), x.split(g.batch), strict=True)
            ]
        )


class Unfolded:
    """The windows side by side in memory, then one product a client: what suits few channels."""

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
    """[K, B * OH * OW, KH * KW * C]: what each output pixel sees, channels last."""
    p, s = g.padding, g.stride
    rows = F.pad(x.permute(0, 2, 3, 1), (0, 0, p, p, p, p))
    windows = rows.unfold(1, g.kernel_height, s).unfold(2, g.kernel_width, s)
    return windows.movedim(3, -1).reshape(g.clients, g.batch * g.out_height * g.out_width, -1)


def _matrices(w: Tensor) -> Tensor:
    """[K, O, KH * KW * C]."""
    return w.movedim(2, -1).flatten(2)


def _as_rows(images: Tensor, clients: int) -> Tensor:
    """[K, pixels, channels]."""
    return images.permute(0, 2, 3, 1).reshape(clients, -1, images.shape[1])


def _as_images(rows: Tensor, channels: int, height: int, width: int) -> Tensor:
    return rows.reshape(-1, height, width, channels).permute(0, 3, 1, 2)
