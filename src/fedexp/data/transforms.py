"""Transforms of batches between federation and model: normalisation and data augmentation.

`Transform` is the protocol that engines call; `Images` implements it for uint8 images, with random
crops and flips computed on the device of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.data.federation import Batch
from fedexp.errors import require


class Transform(Protocol):
    """A pure function of a batch and random draws, e.g. normalisation with augmentation.

    Random numbers are drawn on the host and applied on the device of the batch. Each (seed, round,
    client) has one generator, and the engine calls `draw` with it step by step, so augmentation
    does not depend on the engine or the device.
    """

    def draw(self, rng: np.random.Generator, examples: int) -> Any:
        """Return the random numbers for the examples of one step, or None if there are none."""

    def draw_steps(self, rng: np.random.Generator, examples: NDArray[np.int64]) -> Any:
        """Return the concatenation of `draw` over several steps, along the examples; or None."""

    def train(self, batch: Batch, draws: Any) -> Batch:
        """Return the batch as the model sees it in training."""

    def evaluate(self, batch: Batch) -> Batch:
        """Return the batch as the model sees it in evaluation."""


Augment = Literal["example", "batch"]


@dataclass(frozen=True)
class Images:
    """A `Transform` for uint8 images [..., C, H, W]: (x / 255 - mean) / std.

    In training, images are also shifted by up to `pad` pixels in each direction and flipped
    horizontally with probability 1/2. Padding is zero AFTER normalisation, that is, the mean
    colour, as in the released code, which crops normalised images.

    Args:
        mean: mean of each channel, with pixels in [0, 1].
        std: standard deviation of each channel; a negative one inverts the image.
        augment: "example" draws per example; "batch" once for all examples of a step, as the
            released code does (docs/paper.md#released-augmentation); None turns augmentation off.
        pad: the largest shift, in pixels.
        flip: whether to flip.

    >>> images = Images(mean=(0.5,), std=(0.5,), augment=None)
    >>> images.evaluate({"x": torch.tensor([[[[0, 255]]]], dtype=torch.uint8)})["x"].tolist()
    [[[[-1.0, 1.0]]]]
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: Augment | None = "example"
    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        require(
            len(self.mean) == len(self.std) > 0,
            f"mean and std need one number per channel, not {self.mean} and {self.std}",
        )
        require(all(self.std), f"std must not be zero, but is {self.std}")
        choices = (*get_args(Augment), None)
        require(self.augment in choices, f"augment is one of {choices}, not {self.augment!r}")
        require(self.pad >= 0, f"pad must not be negative, but is {self.pad}")

    def draw(self, rng: np.random.Generator, examples: int) -> NDArray[np.int64] | None:
        """Return one row (dy, dx, flip) per example: the crop's origin in the padded image.

        >>> Images((0.5,), (0.5,), "batch").draw(np.random.default_rng(0), examples=2).tolist()
        [[7, 5, 1], [7, 5, 1]]
        """
        return self.draw_steps(rng, np.array([examples]))

    def draw_steps(
        self, rng: np.random.Generator, examples: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Return the rows that `draw` returns step by step, for all steps at once."""
        if self.augment is None:
            return None
        shifts = 2 * self.pad + 1
        per_example = self.augment == "example"
        decisions = int(examples.sum()) if per_example else len(examples)
        drawn = rng.integers([shifts, shifts, 1 + self.flip], size=(decisions, 3))
        return drawn if per_example else np.repeat(drawn, examples, axis=0)

    def train(self, batch: Batch, draws: NDArray[np.int64] | Tensor | None) -> Batch:
        """Return the batch with `x` normalised, cropped and flipped by `draws`, [..., 3]."""
        x = self._check(batch["x"])
        if draws is None:
            return {**batch, "x": self._normalise(x)}
        decisions = torch.as_tensor(draws, device=x.device)
        require(
            decisions.shape == (*x.shape[:-3], 3),
            f"draws of shape {list(decisions.shape)} do not fit images of {list(x.shape)}",
        )
        source, inside = self._source_pixels(decisions, *x.shape[-2:])
        pixels = x.flatten(-2).gather(-1, source.expand(*x.shape[:-2], -1)).view(x.shape)
        inside = inside.view(*x.shape[:-3], 1, *x.shape[-2:])
        return {**batch, "x": self._normalise(pixels).masked_fill(~inside, 0.0)}

    def evaluate(self, batch: Batch) -> Batch:
        """Return the batch with `x` normalised."""
        return {**batch, "x": self._normalise(self._check(batch["x"]))}

    def _source_pixels(self, draws: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return, for each output pixel, the index of its source pixel and whether there is one.

        Both have shape [..., 1, height * width].
        """
        dy, dx, flip = draws[..., None].unbind(-2)
        row = torch.arange(height, device=draws.device) + (dy - self.pad)
        column = torch.arange(width, device=draws.device)
        column = torch.where(flip > 0, width - 1 - column, column) + (dx - self.pad)
        row, column = row[..., :, None], column[..., None, :]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        source = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        return source.flatten(-2)[..., None, :], inside.flatten(-2)[..., None, :]

    def _check(self, x: Tensor) -> Tensor:
        require(
            x.dtype == torch.uint8 and x.ndim >= 4 and x.shape[-3] == len(self.mean),
            f"expected images of uint8 of shape [N, {len(self.mean)}, H, W], not "
            f"{str(x.dtype).removeprefix('torch.')} of {list(x.shape)}; give pixels as uint8, "
            "channels first",
        )
        return x

    def _normalise(self, x: Tensor) -> Tensor:
        centre, scale = _per_channel(tuple(self.mean), tuple(self.std), x.device)
        return (x - centre) / scale


@lru_cache(maxsize=32)
def _per_channel(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return mean and std times 255, cached on the device to avoid a copy per step."""
    rows = [[255 * value for value in values] for values in (mean, std)]
    centre, scale = torch.tensor(rows, dtype=torch.float32).to(device)[:, :, None, None]
    return centre, scale
