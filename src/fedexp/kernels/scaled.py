"""Float32 as half precision times a power of two for each client: what tensor cores like best.

tf32 and half precision both keep ten bits behind the point, so products lose no more; half
precision is read in half the time, multiplied at twice the rate, and in any order. What it lacks is
range. So the largest number of a client is brought to between 2**14 and 2**15, and everything down
to 2**-28 times that keeps ten bits. Below, numbers are off by at most 2**-39 of the largest.
(Of a client whose largest is below 2**-112: by at most 2**-151.)
A power of two of its own for every client, because one that diverges must not blur the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedexp.kernels.geometry import Geometry
from fedexp.kernels.launch import has_triton

Units = tuple[Tensor, Tensor]  # of the two operands, [K] each: what undoes their scales

TARGET = 14 + 127 + 127  # the largest number's own exponent taken off: its scale's, biased by 127
LARGEST_EXPONENT = 253  # of a scale, so that its inverse is a normal number
FEW_CHANNELS = 16  # below that, the tensor cores' products are mostly padding
LARGEST_WINDOW = 128  # taps times channels that are gathered at once


def takes_scaled(x: Tensor, g: Geometry) -> bool:
    """Whether this convolution has its float32 operands scaled: for many clients, where tf32 may.

    Of few channels, as in a first layer, it is bound by its results, and stays as it is.
    """
    if x.dtype != torch.float32 or not x.is_cuda or g.clients == 1:
        return False
    return torch.backends.cuda.matmul.allow_tf32 and has_triton() and not has_few_channels(g)


def has_few_channels(g: Geometry) -> bool:
    window = g.kernel_height * g.kernel_width * g.channels
    return g.channels < FEW_CHANNELS and window <= LARGEST_WINDOW


def result_type(operand: Tensor, units: Units | None) -> torch.dtype:
    """Products of scaled numbers are float32 again, others what their operands are."""
    return operand.dtype if units is None else torch.float32


def scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers [K, n] in half precision, and what each client's are to be multiplied by, [K]."""
    if rows.is_cuda and has_triton():
        from fedexp.kernels import scaled_triton

        return scaled_triton.scaled_half(rows)
    return plain_scaled_half(rows)


def plain_scaled_half(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch.

    >>> half, unit = plain_scaled_half(torch.tensor([[1e-6, -3e-6], [2e8, 1.0]]))
    >>> half.dtype, (half.float() * unit[:, None]).tolist()[1]
    (torch.float16, [200015872.0, 1.0])
    """
    own = rows.abs().amax(dim=1).view(torch.int32) >> 23  # the exponent; 255 if not finite
    exponent = (TARGET - own).clamp(max=LARGEST_EXPONENT)
    exponent = torch.where(own == 255, 127, exponent)
    scale, unit = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    return (rows * scale[:, None]).half(), unit


def scaled_images(x: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    """Of images [K * B, C, H, W], channels last in memory."""
    last = x.permute(0, 2, 3, 1)
    half, unit = scaled_half(last.reshape(clients, -1))
    return half.view(last.shape).permute(0, 3, 1, 2), unit


def scaled_weights(w: Tensor) -> tuple[Tensor, Tensor]:
    """Of weights [K, O, C, KH, KW], channels last in memory."""
    last = w.movedim(2, -1)
    half, unit = scaled_half(last.flatten(1))
    return half.view(last.shape).movedim(-1, 2), unit
