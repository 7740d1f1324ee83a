"""The digits: they can be learnt, clients differ, and the test set is fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedexp as fx


@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_digits_learn(model: str) -> None:
    task = fx.tasks.digits(model)  # type: ignore[arg-type]
    assert (task.train.clients, int(task.train.sizes.sum()) + len(task.test["y"])) == (50, 1759)  # type: ignore[index]
    *_, last = fx.simulate(task, fx.fedexp(eps=0.1), 12, task.cohort, evaluate_every=12)
    assert last.test_accuracy is not None
    assert last.test_accuracy > 0.75


def test_digits_are_heterogeneous_and_the_test_set_is_fixed() -> None:
    one, two = fx.tasks.digits(seed=0), fx.tasks.digits(seed=1)
    assert torch.equal(one.test["x"], two.test["x"])  # type: ignore[index]
    assert not torch.equal(one.train.fields["x"], two.train.fields["x"])
    known = [one.train.client(i)["y"].unique().numel() for i in range(50)]
    assert np.mean(known) < 5
