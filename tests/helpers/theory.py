"""Random problems with a known optimum, and the numpy reference for the theory tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

import fedexp as fx
from fedexp.data import Batch
from fedexp.objective import Buffers

Array = NDArray[np.float64]

ROUNDING = 1e-12  # 4500 roundings of float64 in a row; no number below has a longer history
SEEDS = st.integers(0, 2**32 - 1)
FRACTIONS = st.floats(0.01, 1.0)
EPS = st.one_of(st.just(0.0), st.floats(1e-6, 10.0))

# φ and φ', each with |φ''| <= 1 and its minimum φ(0) = 0; the first two are convex.
LOSSES: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "square": (lambda z: z * z / 2, lambda z: z),
    "logcosh": (lambda z: np.logaddexp(z, -z) - np.log(2), np.tanh),
    "welsch": (lambda z: -np.expm1(-z * z / 2), lambda z: z * np.exp(-z * z / 2)),
}


def examples(number: int) -> settings:
    """Return settings for `number` examples, the same on every machine, without a time limit."""
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


@dataclass(frozen=True, eq=False)
class Problem:
    """F_i(w) = sum_j φ(a_ij · w - b_ij): features A [M, n, d], targets b [M, n], optimum, start."""

    A: Array
    b: Array
    star: Array
    start: Array
    kind: str = "square"

    @property
    def smoothness(self) -> float:
        """L: the largest eigenvalue of any A_iᵀA_i, because |φ''| <= 1."""
        return float(np.linalg.norm(self.A, ord=2, axis=(1, 2)).max() ** 2)

    def loss(self, w: Array) -> float:
        """Return F(w), the mean over clients."""
        return float(LOSSES[self.kind][0](self.A @ w - self.b).sum(axis=1).mean())

    def gradients(self, w: Array) -> Array:
        """Return ∇F_i, row by row, at one point per client [M, d] or at a common one [d]."""
        z = np.einsum("mnd,md->mn", self.A, np.broadcast_to(w, (len(self.A), w.shape[-1])))
        slopes: Array = np.einsum("mnd,mn->md", self.A, LOSSES[self.kind][1](z - self.b))
        return slopes

    def paths(self, w: Array, lr: float, steps: int) -> Array:
        """Run local gradient descent (eq. 2) of every client from w: points [steps + 1, M, d]."""
        points = [np.tile(w, (len(self.A), 1))]
        for _ in range(steps):
            points.append(points[-1] - lr * self.gradients(points[-1]))
        return np.stack(points)

    def task(self) -> fx.tasks.Task:
        """Return the problem as a task."""
        task = fx.tasks.linear_regression(self.A, self.b, start=self.start)
        if self.kind == "square":
            return task
        return replace(task, objective=SlopeObjective(self.start, self.kind))

    def client(self, i: int) -> Problem:
        """Return the problem of client i alone."""
        return replace(self, A=self.A[i : i + 1], b=self.b[i : i + 1])


class SlopeObjective:
    """The objective contract for any φ of the table."""

    def __init__(self, start: Array, kind: str) -> None:
        self.start, (self.value, self.slope) = start, LOSSES[kind]

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        return torch.tensor(self.start), Buffers.none()

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        x, y = batch["x"].numpy(), batch["y"].numpy()
        return torch.from_numpy(x.T @ self.slope(x @ params.numpy() - y)), buffers

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        x, y = batch["x"].numpy(), batch["y"].numpy()
        return {"loss": torch.from_numpy(self.value(x @ params.numpy() - y))}


def _draw(rng: np.random.Generator, clients: int) -> tuple[Array, Array, Array]:
    """Draw features with a scale and a mean per client; an optimum; a start."""
    n, d = rng.integers(1, 4), rng.integers(2, 10)
    scale = 10 ** rng.uniform(-0.5, 0.5, size=(clients, 1, 1))
    A = scale * (rng.normal(size=(clients, n, d)) + rng.normal(size=(clients, 1, d)))
    star = rng.normal(size=d)
    return A, star, star + rng.normal(size=d) * 10 ** rng.uniform(-1, 1)


def shared_optimum(seed: int, kind: str = "square") -> Problem:
    """Return a problem in which w* is every client's minimum: the regime of Lemma 1."""
    rng = np.random.default_rng(seed)
    A, star, start = _draw(rng, int(rng.integers(1, 7)))
    return Problem(A, A @ star, star, start, kind)


def disputed_optimum(seed: int, kind: str = "square") -> Problem:
    """Return a problem with pairs of opposed clients, so ∇F(w*) = 0 while no ∇F_i(w*) is."""
    rng = np.random.default_rng(seed)
    A, star, start = _draw(rng, int(rng.integers(1, 4)))
    pull = rng.normal(size=A.shape[:2]) * 10 ** rng.uniform(-1, 1)
    b = np.concatenate([A @ star + pull, A @ star - pull])
    return Problem(np.concatenate([A, A]), b, star, start, kind)


class Run(NamedTuple):
    """A simulated trajectory: iterates w⁰ ... w^T, step sizes η_g of rounds 0 ... T-1, records."""

    points: Array
    steps: Array
    records: list[fx.Record]


def run(
    problem: Problem, algorithm: fx.Algorithm, rounds: int, lr: float, steps: int, **options: Any
) -> Run:
    """Simulate with full batches, and collect the iterates before any averaging."""
    local = fx.LocalTraining(lr=lr, steps=steps, batch_size=None)
    every = {"local": local, "evaluate_every": rounds, **options}
    records = list(fx.simulate(problem.task(), algorithm, rounds, **every))
    points = [problem.start, *(record.state.params.numpy() for record in records)]
    return Run(np.stack(points), np.array([r.server_lr for r in records], dtype=float), records)


def local_paths(problem: Problem, lr: float, steps: int) -> Array:
    """Return the clients' local iterates as the package computes them: points [steps + 1, M, d].

    A federation of one client that takes one step per round and averages is gradient descent.
    """
    alone = [problem.client(i) for i in range(len(problem.A))]
    return np.stack([run(p, fx.fedavg(), steps, lr, 1).points for p in alone], axis=1)


def deltas(problem: Problem, w: Array, lr: float, steps: int) -> Array:
    """Return Δ_i = w - w_i (eq. 3), one row per client."""
    updates: Array = w - problem.paths(w, lr, steps)[-1]
    return updates


def mean_sq(rows: Array) -> float:
    """Return the mean of the rows' squared norms."""
    return sum(float(row @ row) for row in rows) / len(rows)


def sq(vector: Array) -> float:
    """Return ||vector||²."""
    return float(vector @ vector)


def oracle(w: Array, star: Array, updates: Array) -> float:
    """Return the step size that ends nearest to w* (eq. 7)."""
    mean = updates.mean(axis=0)
    return float((w - star) @ mean) / sq(mean)
