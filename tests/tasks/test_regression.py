"""Linear regression: the definition of the paper's problems, and its claims on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedexp as fx


def final_loss(task: fx.tasks.Task, name: str, rounds: int) -> float:
    setup = fx.Experiment(task, name).setup
    *_, last = fx.simulate(task, setup.algorithm, rounds, local=setup.local, evaluate_every=rounds)
    assert last.train_loss is not None
    return last.train_loss


def test_the_order_of_the_paper_on_synthetic() -> None:
    """Fig. 3: FedExP << SCAFFOLD < FedAdagrad < FedAvg after 200 rounds, tuned values."""
    task = fx.tasks.synthetic()
    names = ("fedexp", "scaffold", "fedadagrad", "fedavg")
    fedexp, *others = (final_loss(task, name, 200) for name in names)
    assert fedexp < 1e-11
    assert all(1e-8 < loss < 1e-4 for loss in others)
    assert sorted(others) == others


def test_synthetic_is_normalised() -> None:
    task = fx.tasks.synthetic()
    x, y = task.train.fields["x"], task.train.fields["y"]
    assert x.shape == (600, 1000)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(600).double())
    torch.testing.assert_close(y.view(20, 30).norm(dim=1), torch.ones(20).double())
    raw = fx.tasks.synthetic(normalize=False)
    spread = raw.train.fields["x"].view(20, 30, 1000)
    assert (spread - spread.mean(1, keepdim=True)).std().item() == pytest.approx(0.98, abs=0.02)


def test_linear_regression_loss_and_gradient() -> None:
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 4))
    task = fx.tasks.linear_regression(A, b)
    w = rng.normal(size=5)
    loss = np.mean([((A[i] @ w - b[i]) ** 2).sum() for i in range(3)])
    params, buffers = task.objective.initial(0)
    assert params.tolist() == [0.0] * 5
    assert task.evaluate(torch.from_numpy(w), buffers)["train_loss"] == pytest.approx(loss)
    grad, _ = task.objective.gradient(torch.from_numpy(w), buffers, task.train.client(1))
    np.testing.assert_allclose(grad.numpy(), A[1].T @ (A[1] @ w - b[1]), rtol=1e-12)
    assert (task.local.steps, task.local.lr, task.local.batch_size) == (20, 0.1, None)


@pytest.mark.parametrize(
    ("A", "b", "message"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3)), "A must have shape"),
        (np.zeros((2, 3, 4)), np.zeros((2, 4)), "b must have shape"),
        (np.full((2, 3, 4), np.nan), np.zeros((2, 3)), "finite"),
        (np.zeros((2, 0, 4)), np.zeros((2, 0)), "at least one row"),
    ],
)
def test_bad_data_is_refused(A: np.ndarray, b: np.ndarray, message: str) -> None:
    with pytest.raises(fx.UsageError, match=message):
        fx.tasks.linear_regression(A, b)
