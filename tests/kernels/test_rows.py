"""Sums over one vector per client: kernels against their plain twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedexp.aggregate import LONG_ROW, Aggregate, finite_norms
from fedexp.kernels.launch import without_kernels
from tests.helpers.kernels import needs_gpu

pytestmark = needs_gpu
SIZES = (LONG_ROW, LONG_ROW + 10, 3 * LONG_ROW + 4097)


def rows(size: int, seed: int, padding: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    whole = torch.randn(7, size + padding, generator=generator, device="cuda")
    return whole[:, :size]  # rows of a wider matrix, where there is padding


def both(*args: object) -> tuple[Aggregate, Aggregate]:
    """Return the sums by kernels, and by their plain twins in float64."""
    deltas, weights, extras = args
    assert isinstance(deltas, Tensor)
    assert isinstance(extras, dict)
    found = Aggregate.of(deltas, weights, extras)
    with without_kernels():
        exact = {name: value.double() for name, value in extras.items()}
        return found, Aggregate.of(deltas.double(), weights, exact)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("padding", [0, 6])
def test_sums_of_long_vectors(size: int, padding: int) -> None:
    weights = [1.0, 0.0, 2.5, 1e-3, 7.0, 3.0, 1.0]
    found, exact = both(rows(size, 0, padding), weights, {"control": rows(size, 1)})
    scale = exact.update.abs().max()
    assert found.update.dtype == torch.float32
    assert ((found.update - exact.update).abs().max() / scale).item() < 1e-7
    assert ((found.extras["control"] - exact.extras["control"]).abs().max() / scale).item() < 1e-6
    assert found.sq_norm.item() == pytest.approx(exact.sq_norm.item(), rel=1e-13)
    assert found.count.item() == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["update", "extra"])
def test_a_client_that_is_not_finite_adds_nothing(bad: float, where: str) -> None:
    deltas, control = rows(LONG_ROW, 0).clone(), rows(LONG_ROW, 1).clone()
    (deltas if where == "update" else control)[3, 5000] = bad
    assert finite_norms(deltas, {"control": control}).finite.tolist() == [k != 3 for k in range(7)]
    found, exact = both(deltas, None, {"control": control})
    assert (found.count.item(), found.dropped.item()) == (6, 1)
    torch.testing.assert_close(found.update.double(), exact.update, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        found.extras["control"].double(), exact.extras["control"], rtol=1e-6, atol=1e-6
    )


def test_squares_that_overflow_float32_count() -> None:
    deltas = rows(LONG_ROW, 0) * 1e30
    assert finite_norms(deltas, {"control": deltas}).finite.all()
