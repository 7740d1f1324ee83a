"""Least squares: the paper's convex problems."""

from __future__ import annotations

import torch
from torch import Tensor

from fedexp.data.federation import Batch
from fedexp.errors import require
from fedexp.objective.base import Buffers
from fedexp.objective.linear_steps import LinearSteps
from fedexp.precision import Precision


class LeastSquares:
    """F_i(w) = ||A_i w - b_i||², with the local gradient A_iᵀ(A_i w - b_i).

    The gradient is half of the true one: the paper's tuned step sizes hold for that (audit B24).
    """

    def __init__(self, start: Tensor, gradient_scale: float = 1.0) -> None:
        self.start = start
        self.gradient_scale = gradient_scale

    def on(self, device: torch.device, precision: Precision) -> LeastSquares:
        require(precision != "bf16", "least squares are solved in float64; leave precision out")
        return LeastSquares(self.start.to(device), self.gradient_scale)

    def batching_pays(self, device: torch.device) -> bool:
        """On a CPU one client's matrix stays in a core's cache over all steps; twenty do not."""
        return device.type != "cpu"

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return self.start.clone(), Buffers.none()

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        x = batch["x"]
        residual = torch.mv(x, params).sub_(batch["y"])
        grad = torch.mv(x.t(), residual)
        return (grad if self.gradient_scale == 1.0 else grad * self.gradient_scale), buffers

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        x = batch["x"]
        residual = torch.baddbmm(-batch["y"][:, :, None], x, params[:, :, None])
        counted = (residual.squeeze(2) * valid)[:, None, :] * self.gradient_scale
        return torch.bmm(counted, x).squeeze(1), buffers

    def linear_steps(self, batch: Batch) -> LinearSteps:
        """Any number of steps on the whole data of K clients, as one map."""
        return LinearSteps(batch["x"], batch["y"], self.gradient_scale)

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return {"loss": torch.mv(batch["x"], params).sub_(batch["y"]).square_()}
