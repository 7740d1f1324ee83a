"""A copy of a model for one thread: with dropout of its own, and with layers in a quicker order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedexp.data.federation import Batch
from fedexp.objective.base import Buffers
from fedexp.objective.module import ModuleObjective
from fedexp.objective.own_gradient import OwnGradient, own_linears
from fedexp.objective.tiled import tile_front
from fedexp.precision import Precision

LEVELS = 2**16  # a decision takes 16 of the 64 bits of a draw, so a draw serves four
NEAR = 1e-3  # of a gradient's norm; another order of additions in float32 makes 1e-6 of it


class PrivateCopy:
    """An objective that shares nothing with others; one thread at a time may use it."""

    def __init__(self, objective: ModuleObjective) -> None:
        precision: Precision = "float32" if objective.compute_type is None else "bf16"
        self.objective = objective.on(objective.device, precision)
        self.dropouts = own_dropouts(self.objective.module)
        gradient = OwnGradient(self.objective.params)
        self.objective.join = gradient.joined
        own_linears(self.objective.module, gradient)
        tile_front(self.objective.module)
        pool_first(self.objective.module)
        flatten_first(self.objective.module)

    def seed(self, derived: int) -> None:
        """Let all draws follow from a seed."""
        for k, layer in enumerate(self.dropouts):
            layer.generator.manual_seed(derived + k)

    def agrees(
        self, original: ModuleObjective, params: Tensor, buffers: Buffers, batch: Batch
    ) -> bool:
        """Whether it gives the original's gradient, where nothing is dropped.

        A model may call the layers of a sequence one by one, and see that they changed places.
        """
        for objective in (original, self.objective):
            objective.module.eval()
        one = original._gradient(params.clone(), buffers, batch)[0]
        other = self.objective._gradient(params.clone(), buffers, batch)[0]
        return bool((one - other).norm() <= NEAR * one.norm())


class OwnDropout(nn.Dropout):
    """`nn.Dropout` with a generator of its own; p is exact to 1 / 65,536.

    It draws a quarter as often: torch's own takes as long as a convolution.
    """

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self.generator = torch.Generator()

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        count = input.numel()
        draws = torch.empty(-(-count // 4), dtype=torch.int64)
        draws.random_(-(2**63), None, generator=self.generator)
        # in the order in which the input lies in memory, channels last or not
        scale = torch.empty_like(input)
        levels = draws.view(torch.int16)[:count].as_strided(input.shape, scale.stride())
        # numbers at once: turning truth values into them takes as long as all the rest
        torch.ge(levels, round(self.p * LEVELS) - LEVELS // 2, out=scale)
        return input * scale.mul_(1 / (1 - self.p) if self.p < 1 else 0.0)


def own_dropouts(module: nn.Module) -> list[OwnDropout]:
    """Replace every plain dropout in the module, and return those in their place."""
    found: list[OwnDropout] = []
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                found.append(OwnDropout(child.p))
                setattr(parent, name, found[-1])
    return found


def pool_first(module: nn.Module) -> None:
    """Let maxima be taken before a ReLU, not after: the same numbers from a quarter of the work."""
    for sequence in [m for m in module.modules() if type(m) is nn.Sequential]:
        for k in range(len(sequence) - 1):
            relu, pool = sequence[k], sequence[k + 1]
            if type(relu) is nn.ReLU and type(pool) is nn.MaxPool2d and not pool.return_indices:
                sequence[k], sequence[k + 1] = pool, relu


def flatten_first(module: nn.Module) -> None:
    """Let dropout come after a `Flatten`, where examples and their errors lie in the same order."""
    for sequence in [m for m in module.modules() if type(m) is nn.Sequential]:
        for k in range(len(sequence) - 1):
            if isinstance(sequence[k], OwnDropout) and type(sequence[k + 1]) is nn.Flatten:
                sequence[k], sequence[k + 1] = sequence[k + 1], sequence[k]
