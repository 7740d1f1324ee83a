"""`Geometry`: the sizes of a convolution of many clients."""

from __future__ import annotations

from dataclasses import dataclass


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
    def turned(self) -> Geometry:
        """Of stride 1: the convolution that takes a gradient back from outputs to inputs."""
        window = (self.kernel_height, self.kernel_width)
        images = (self.outputs, self.out_height, self.out_width)
        sizes = (self.clients, self.batch, *images, self.channels, *window)
        return Geometry(*sizes, 1, self.kernel_height - 1 - self.padding)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one direction."""
        window = self.kernel_height * self.kernel_width * self.channels
        pixels = self.clients * self.batch * self.out_height * self.out_width
        return 2 * pixels * window * self.outputs
