"""Layouts: from named arrays to vectors and back, and what does not fit."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fedexp.errors import UsageError
from fedexp.flower import (
    FedExP,
    Layout,
    SecureAggregation,
    initial_arrays,
)
from fedexp.flower.layout import named_parts
from fedexp.flower.server import NoRepliesError
from fedexp.privacy import CentralPrivacy, LocalPrivacy
from tests.flower.helpers.fake_grid import FakeGrid, only, replies
from tests.flower.helpers.user_app import (
    ConstantBufferNet,
    TiedNet,
    float64_task,
    plain_task_app,
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 2))


def record() -> ArrayRecord:
    return ArrayRecord(model().state_dict())


def test_a_record_comes_back_as_it_was() -> None:
    layout = Layout.of(record())
    again = layout.arrays(layout.flat(record()), layout.buffers(record()))
    assert list(again) == list(record())
    for name, array in record().items():
        assert again[name].dtype == array.dtype
        assert np.array_equal(again[name].numpy(), array.numpy())


def test_batchnorm_statistics_are_averaged_and_counters_unchanged() -> None:
    layout = Layout.of(record())
    assert layout.averaged == ("1.running_mean", "1.running_var")
    assert layout.kept == ("1.num_batches_tracked",)
    assert layout.dim == sum(p.numel() for p in model().parameters())
    assert (
        layout.flat(record()).tolist()
        == torch.cat([p.detach().flatten() for p in model().parameters()]).tolist()
    )


def test_buffers_can_be_named() -> None:
    layout = Layout.of(record(), buffers=["3.bias"])
    assert layout.averaged == ("3.bias",)
    assert "1.running_mean" in layout.parameters
    assert layout.kept == ("1.num_batches_tracked",)


def test_half_precision_is_widened_and_rounded_as_receivers_see_it() -> None:
    layout = Layout.of({"w": np.array([1.0, 2.0], np.float16)})
    third = torch.tensor([1 / 3, 1e9])
    assert layout.flat({"w": np.array([1.0, 2.0], np.float16)}).dtype == torch.float32
    assert layout.rounded(third)[0].item() == float(np.float16(1 / 3))
    assert not layout.rounded(third).isfinite().all()


def test_float64_stays_wide() -> None:
    arrays = {"a": np.array([1 / 3]), "b": np.ones(2, np.float32)}
    layout = Layout.of(arrays)
    assert layout.flat(arrays)[0].item() == 1 / 3
    assert layout.arrays(layout.flat(arrays), layout.buffers(arrays))["b"].dtype == "float32"


@pytest.mark.parametrize(
    ("arrays", "buffers", "pattern"),
    [
        ({"w": np.ones(2)}, ["v"], "buffers names v"),
        ({"steps": np.ones(2, int)}, None, "no parameters"),
        ({"w": np.ones(2, complex)}, None, "type complex128"),
    ],
)
def test_what_is_not_a_model_is_refused(arrays, buffers, pattern) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=pattern):
        Layout.of(arrays, buffers)


@pytest.mark.parametrize(
    ("arrays", "pattern"),
    [
        ({"w": np.ones((2, 2))}, "no array 'b'"),
        (
            {"w": np.ones((2, 2)), "b": np.ones(2), "c": np.ones(1)},
            "'c', which the model does not have",
        ),
        ({"w": np.ones(4), "b": np.ones(2)}, r"'w' has shape \(4,\) instead of \(2, 2\)"),
        ({"w": np.ones((2, 2)), "b": np.ones(2, int)}, "'b' is of type int64 instead of float64"),
    ],
)
def test_misfits_have_a_reason(arrays, pattern) -> None:  # type: ignore[no-untyped-def]
    layout = Layout.of({"w": np.ones((2, 2)), "b": np.ones(2)})
    reason = layout.misfit(arrays)
    assert reason is not None
    assert re.search(pattern, reason)


def test_a_fitting_model_has_no_misfit() -> None:
    layout = Layout.of(record())
    assert layout.misfit({name: array.numpy() for name, array in record().items()}) is None


def test_arrays_with_equal_beginnings_are_not_tied() -> None:
    """A copy of a layer, e.g. of a teacher, that is trained on its own."""
    task = float64_task(ConstantBufferNet)

    def parts(content: RecordDict) -> None:
        arrays = content.array_records["arrays"].to_torch_state_dict()
        arrays["second.weight"] = arrays["second.weight"] + 1.0
        content["arrays"] = ArrayRecord(arrays)

    grid = FakeGrid(plain_task_app(task), 4, faults=dict.fromkeys(range(4), only(replies(parts))))
    strategy = FedExP(fraction_evaluate=0.0)
    result = strategy.start(grid, initial_arrays(task), 1)
    assert result.arrays is not None
    arrays = result.arrays.to_torch_state_dict()
    assert not torch.equal(arrays["second.weight"], arrays["first.weight"])
    assert strategy.run is not None
    assert strategy.run.layout.tied == {}


@pytest.mark.parametrize(
    "option",
    [
        {"privacy": CentralPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)},
        {"privacy": LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=1.0)},
        {"secure": SecureAggregation(clip=1.0)},
    ],
    ids=["central", "local", "secure"],
)
def test_ties_are_not_guessed_where_a_wrong_guess_costs_privacy(option: dict[str, Any]) -> None:
    """Layers of a TransformerEncoder are copies: as ties they made all replies unusable."""
    layer = nn.Linear(3, 3)
    arrays = ArrayRecord(nn.Sequential(layer, copy.deepcopy(layer)).state_dict())
    grid = FakeGrid(ClientApp(), 3)
    with pytest.raises(UsageError, match=r"'1.weight' and '0.weight' are equal.*model= or tied="):
        FedExP(fraction_evaluate=0.0, **option).start(grid, arrays, 1)
    assert grid.sent == []
    made = FedExP(fraction_evaluate=0.0, tied={}, max_empty_rounds=1, **option)
    with pytest.raises(NoRepliesError):
        made.start(grid, arrays, 1)


def test_a_module_names_its_parts() -> None:
    assert named_parts(TiedNet()) == (["centre"], {"second.weight": "first.weight"})


@pytest.mark.parametrize(
    "tied", [{"a": "b", "b": "c"}, {"a": "a"}, {"a": "other"}, {"a": "running_mean"}]
)
def test_ties_that_cannot_be_are_refused(tied: dict[str, str]) -> None:
    names = ("a", "b", "c", "running_mean")
    arrays = {name: torch.zeros(2) for name in names} | {"other": torch.zeros(3)}
    with pytest.raises(UsageError, match="cannot be tied"):
        FedExP(tied=tied).start(FakeGrid(ClientApp()), ArrayRecord(arrays), 1)
