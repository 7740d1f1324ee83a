"""Linear regression: the paper's toy and synthetic problems, and least squares on any data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedexp.data.federation import Federation
from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.objective import LeastSquares
from fedexp.seeding import generator
from fedexp.tasks.recipe import RECIPES
from fedexp.tasks.task import Task


def linear_regression(A: Any, b: Any, start: Any = None, gradient_scale: float = 1.0) -> Task:
    """Return least squares over clients: F(w) = mean over clients of ||A_i w - b_i||².

    The local gradient is A_iᵀ(A_i w - b_i), on all of the client's data, 20 steps of lr 0.1.

    Args:
        A: features, shape [M, n, d].
        b: targets, shape [M, n].
        start: the first model w⁰; zero when None.
        gradient_scale: 1 for the half gradient of the authors (docs/paper.md#half-gradient); 2 for
            the gradient of F_i.

    >>> linear_regression([[[1.0, 0.0]], [[0.0, 1.0]]], [[1.0], [2.0]]).train.clients
    2
    """
    features, targets = _float64(A), _float64(b)
    require(features.ndim == 3, f"A must have shape [M, n, d], not {tuple(features.shape)}")
    require(
        targets.shape == features.shape[:2],
        f"b must have shape {tuple(features.shape[:2])}, not {tuple(targets.shape)}",
    )
    clients, rows, dim = features.shape
    require(clients * rows > 0, "every client needs at least one row of A")
    first = torch.zeros(dim, dtype=torch.float64) if start is None else _float64(start)
    require(first.shape == (dim,), f"start must have shape [{dim}], not {tuple(first.shape)}")
    fields = {"x": features.reshape(-1, dim), "y": targets.reshape(-1)}
    return Task(
        name="linear-regression",
        objective=LeastSquares(first, gradient_scale),
        train=Federation(fields, np.arange(clients + 1, dtype=np.int64) * rows),
        local=LocalTraining(lr=0.1, steps=20, batch_size=None),
        metric="train_loss",
        sums=True,
    )


def synthetic(
    clients: int = 20,
    rows: int = 30,
    dim: int = 1000,
    seed: int = 0,
    normalize: bool = True,
) -> Task:
    """Return the paper's synthetic regression: 20 clients x 30 samples, 1000 parameters (App. D.2).

    Rows are drawn from N(m_i, I), targets from a client's own w_i; u_i and y_i have standard
    deviation 0.1 (docs/paper.md#standard-deviations). Each row and each b_i is scaled to norm 1,
    which the paper does not state but its step sizes require (docs/paper.md#normalised-rows); then
    F(0) = 1.

    Args:
        clients: number of clients M.
        rows: samples per client n.
        dim: number of parameters d.
        seed: seed of the data.
        normalize: scale rows and targets to norm 1.

    >>> task = synthetic(clients=3, rows=4, dim=20)
    >>> round(task.evaluate(*task.objective.initial(0))["train_loss"], 12)
    1.0
    """
    require(min(clients, rows, dim) >= 1, "clients, rows and dim must be at least 1")
    rng = generator(seed, "synthetic")
    mean, truth = rng.normal(0, 0.1, size=(2, clients, 1))
    mean = rng.normal(mean, 1.0, size=(clients, dim))
    truth = rng.normal(truth, 1.0, size=(clients, dim))
    A = rng.normal(mean[:, None, :], 1.0, size=(clients, rows, dim))
    if normalize:
        A /= np.linalg.norm(A, axis=2, keepdims=True)
    b = np.einsum("mnd,md->mn", A, truth)
    if normalize:
        b /= np.linalg.norm(b, axis=1, keepdims=True)
    return replace(linear_regression(A, b), name="synthetic", rounds=200, **RECIPES["synthetic"])


def toy(start: tuple[float, float] = (0.0, 0.0)) -> Task:
    """Return the paper's 2-D problem: F₁ = (3w₁ + w₂ - 3)², F₂ = (w₁ + w₂ - 3)², optimum (0, 3).

    In the paper clients run to convergence, which projects the model onto their solution lines.
    100 steps of lr 1/6 do so to machine precision: they shrink the distance by (2/3)¹⁰⁰ for both
    clients, whose curvatures are 10 and 2. FedExP then has factor 1 and eps 0
    (docs/paper.md#toy-problem).
    """
    task = linear_regression([[[3.0, 1.0]], [[1.0, 1.0]]], [[3.0], [3.0]], start=start)
    return replace(
        task,
        name="toy",
        local=LocalTraining(lr=1 / 6, steps=100, batch_size=None),
        rounds=30,
        **RECIPES["toy"],
    )


def _float64(value: Any) -> Tensor:
    tensor = torch.as_tensor(np.asarray(value), dtype=torch.float64)
    require(bool(tensor.isfinite().all()), "A, b and start must be finite; clean the data")
    return tensor
