"""Least squares, the paper's convex problems, with any number of local steps in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from fedexp.client import LinearCorrection
from fedexp.data.federation import Batch
from fedexp.errors import require
from fedexp.objective.base import Buffers, Constants
from fedexp.precision import Precision


class LeastSquares:
    """F_i(w) = ||A_i w - b_i||², with the local gradient A_iᵀ(A_i w - b_i).

    The gradient is half of the true one: the paper's tuned step sizes hold for that
    (docs/paper.md#half-gradient).
    """

    per_example, classifies = True, False

    def __init__(self, start: Tensor, gradient_scale: float = 1.0) -> None:
        self.start = start
        self.gradient_scale = gradient_scale

    def on(self, device: torch.device, precision: Precision) -> LeastSquares:
        require(precision != "bf16", "least squares are solved in float64; leave precision out")
        return LeastSquares(self.start.to(device), self.gradient_scale)

    def starting_at(self, params: Tensor, buffers: Buffers) -> LeastSquares:
        return LeastSquares(params.clone(), self.gradient_scale)

    def constants(self) -> Constants:
        return Constants((self.gradient_scale if type(self) is LeastSquares else self,))

    def batching_pays(self, device: torch.device) -> bool:
        """Return False for a CPU: one client's matrix stays in a core's cache, twenty do not."""
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
        return LinearSteps(batch["x"], batch["y"], self.gradient_scale)

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return self.score(*self.predict(params, buffers, batch))

    def predict(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.mv(batch["x"], params), batch["y"]

    def score(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": outputs.sub(targets).square_()}


class LinearSteps:
    """Local training of K clients, each on all of its data, for the price of about two steps.

    Gradient descent on a quadratic is a linear iteration, so that `fedexp.local.local_step` is
    never taken. With H = s AᵀA, steps along s Aᵀ(A w - b) + prox (w - w⁰) + offset, and g the first
    of these, τ steps of η lead to

        w⁰ - w^τ = η φ(H) g,    φ(λ) = sum over j < τ of (1 - η (prox + λ))^j.

    The eigenvalues of the smaller of A Aᵀ and AᵀA, found once, replace the steps.

    Args:
        x: their features A, [K, n, d].
        y: their targets b, [K, n].
        scale: s, the factor on Aᵀ(A w - b).
    """

    def __init__(self, x: Tensor, y: Tensor, scale: float) -> None:
        self.x, self.y, self.scale = x, y, scale
        self.rows = x.flatten(0, 1)
        self.wide = x.shape[1] <= x.shape[2]
        self.values, self.vectors = torch.linalg.eigh(x @ x.mT if self.wide else x.mT @ x)
        self._settings: tuple[int, float, float] | None = None

    def updates(self, start: Tensor, steps: int, lr: float, correction: LinearCorrection) -> Tensor:
        """Return w⁰ - w^τ of each client, [K, d], when all start at `start` [d]."""
        phi, at_zero, slope = self._coefficients(steps, lr, correction.prox)
        residual = torch.mv(self.rows, start).view_as(self.y).sub_(self.y)
        offset = None if correction.offset is None else correction.offset.expand(len(self.x), -1)
        if not self.wide:
            first = self._transposed(residual).mul_(self.scale)
            return self._apply(phi, first if offset is None else first.add_(offset))
        # φ(H) Aᵀ = Aᵀ φ(s A Aᵀ), and on what is not a row of A: φ(H) = φ(0) + Aᵀ slope(A Aᵀ) A
        inner = self._apply(phi, residual)
        if offset is None:
            return self._transposed(inner)
        inner += self._apply(slope, torch.bmm(self.x, offset[:, :, None]).squeeze(2))
        return self._transposed(inner).add_(offset, alpha=at_zero)

    def _apply(self, function: Tensor, vectors: Tensor) -> Tensor:
        """Return a function of the Gram matrices, given at their eigenvalues, times vectors."""
        rotated = torch.bmm(self.vectors.mT, vectors[:, :, None])
        return torch.bmm(self.vectors, rotated.mul_(function[:, :, None])).squeeze(2)

    def _transposed(self, inner: Tensor) -> Tensor:
        """Return Aᵀ times a vector for each client: [K, n] to [K, d]."""
        return torch.bmm(inner[:, None, :], self.x).squeeze(1)

    def _coefficients(self, steps: int, lr: float, prox: float) -> tuple[Tensor, float, Tensor]:
        """Return η φ(sλ) at the eigenvalues λ (times s where A is wide), η φ(0), and the slope.

        The slope is η (φ(sλ) - φ(0)) / λ. All are computed by Horner's rule, so that nothing
        cancels, at λ = 0 or anywhere else.
        """
        if self._settings != (steps, lr, prox):
            keep, shrink = 1 - lr * prox, lr * self.scale
            ratio, at_zero = keep - shrink * self.values, 0.0
            phi, slope = torch.zeros_like(self.values), torch.zeros_like(self.values)
            for _ in range(steps):
                slope = (keep * slope).sub_(phi, alpha=shrink)
                phi, at_zero = phi * ratio + 1, 1 + keep * at_zero
            self._settings = (steps, lr, prox)
            factor = shrink if self.wide else lr
            self._cached = factor * phi, lr * at_zero, lr * slope
        return self._cached
