"""`convolve`: its results, its gradients, its fake tensors, and which operands are scaled.

Nothing is scaled on a CPU, so a plain twin stands in for the kernels that take scaled operands.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedexp.kernels import convolution, convolution_torch
from fedexp.kernels.convolution import convolve
from fedexp.kernels.convolution_torch import Geometry, PerClient, Unfold, Units, takes_scaled
from fedexp.precision import arithmetic
from tests.helpers.kernels import (
    BATCH,
    CLIENTS,
    DEVICES,
    SCALED_TOLERANCE,
    SHAPES,
    TOLERANCE,
    geometry,
    random_operands,
    reference_convolution,
    relative_error,
)

SHAPE = (16, 24, 9, 8, 3, 2, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolution_and_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Whatever implementation is chosen, against float64 one client at a time."""
    *_, stride, padding = shape
    x, w = (t.to(dtype).requires_grad_() for t in random_operands(shape, device))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x, w))
    expected = reference_convolution(exact_x, exact_w, stride, padding)
    with arithmetic("tf32" if device == "cuda" else "float32"):
        y = convolve(x, w, None, stride, padding)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
        grads = torch.autograd.grad(y, (x, w), dy)
    expected_grads = torch.autograd.grad(expected, (exact_x, exact_w), dy.double())
    for result, true in zip((y, *grads), (expected, *expected_grads), strict=True):
        assert result.shape == true.shape
        assert relative_error(result, true.detach()) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_implementations_agree(shape: tuple[int, ...]) -> None:
    (x, w), g = random_operands(shape, "cpu"), geometry(shape)
    y = PerClient().forward(x, w, g)
    dy = torch.randn(y.shape, dtype=y.dtype)
    for name, a, b in (
        ("forward", x, w),
        ("input_gradient", dy, w),
        ("weight_gradient", dy, x),
    ):
        one, other = (getattr(each, name)(a, b, g) for each in (PerClient(), Unfold()))
        assert relative_error(one, other) < TOLERANCE[torch.float64]


def test_every_client_has_its_own_bias() -> None:
    x, w = random_operands(SHAPES[0], "cpu")
    bias = torch.randn(CLIENTS, 5, dtype=torch.float64)
    added = convolve(x, w, bias) - convolve(x, w)
    expected = bias.repeat_interleave(BATCH, 0)[:, :, None, None].expand_as(added)
    torch.testing.assert_close(added, expected)


def plain_scaled_dispatch(
    direction: str,
    a: Tensor,
    b: Tensor,
    g: Geometry,
    units: Units | None = None,
    buffer: Tensor | None = None,
) -> Tensor:
    """Return what the kernels compute from scaled operands; weights channels last, images not."""
    assert units is not None
    assert a.dtype == b.dtype == torch.float16
    exact = getattr(PerClient(), direction)(a.double(), b.double(), g).unflatten(0, (g.clients, -1))
    both = (units[0].double() * units[1].double()).view(-1, *[1] * (exact.ndim - 1))
    result: Tensor = (exact * both).flatten(0, 1).float().contiguous()
    if direction != "weight_gradient":
        return result
    return result.movedim(2, -1).contiguous().movedim(-1, 2)


@pytest.fixture
def always_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "takes_scaled", lambda x, g: True)
    monkeypatch.setattr(convolution, "dispatch", plain_scaled_dispatch)


@pytest.mark.parametrize("needed", ["xw", "x", "w"])
def test_gradients_by_finite_differences(needed: str) -> None:
    """Also where only one of them is needed."""
    x, w = random_operands((2, 3, 4, 3, 3, 2, 1), "cpu")
    x.requires_grad_("x" in needed)
    w.requires_grad_("w" in needed)
    assert torch.autograd.gradcheck(lambda x, w: convolve(x, w, None, 2, 1), (x, w))


@pytest.mark.usefixtures("always_scaled")
@pytest.mark.parametrize("needed", ["xw", "x", "w"])
def test_scaled_clients_of_very_different_magnitudes(needed: str) -> None:
    """Each client's result and gradients by itself, against float64."""
    x, w = (t.float() for t in random_operands(SHAPE, "cpu"))
    sizes = torch.tensor([1e-9, 1e9, 1.0]).repeat_interleave(BATCH)[:, None, None, None]
    x *= sizes
    w *= torch.tensor([1.0, 1e-5, 1e5])[:, None, None, None, None]
    ours, theirs = {"x": x, "w": w}, {"x": x.double(), "w": w.double()}
    inputs = [[each[name].requires_grad_() for name in needed] for each in (ours, theirs)]
    expected = reference_convolution(theirs["x"], theirs["w"], 2, 1)
    dy = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)) * sizes.flip(0)
    y = convolve(ours["x"], ours["w"], None, 2, 1)
    results = (y, *torch.autograd.grad(y, inputs[0], dy))
    exact = (expected.detach(), *torch.autograd.grad(expected, inputs[1], dy.double()))
    for result, expected in zip(results, exact, strict=True):
        for own, own_expected in zip(result.chunk(CLIENTS), expected.chunk(CLIENTS), strict=True):
            assert relative_error(own, own_expected) < SCALED_TOLERANCE


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"clients": 1}, False),
        ({"channels": 3}, False),
        ({"channels": 15, "kernel_height": 5, "kernel_width": 5}, True),
    ],
)
def test_which_sizes_are_scaled(
    changed: dict[str, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution_torch, "has_triton", lambda: True)
    g = replace(Geometry(2, 4, 16, 8, 8, 8, 3, 3), **changed)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(1, device="cuda")
        with arithmetic("tf32"):
            assert takes_scaled(x, g) == expected
            assert not takes_scaled(x.bfloat16(), g)
            assert not takes_scaled(x.double(), g)
            assert not takes_scaled(x.cpu(), g)  # a CPU has no tf32
        with arithmetic("float32"):
            assert not takes_scaled(x, g)


def test_the_table_of_known_layers_names_implementations() -> None:
    """Keys are those that a layer asks for, and names those of tilings and boxes."""
    name = re.compile(r"each|unfold|few|(box \d+x\d+x\d+ \d+x\d+|\d+x\d+x\d+)w\ds\dt?(/\d+)?")
    key = re.compile(
        r"(forward|input_gradient|weight_gradient) (\d+)x(\d+)x(\d+)-(\d+) (\d)x(\d) "
        r"stride (\d) padding (\d) (bfloat16|float16|float32)"
    )
    table = json.loads(convolution.CHOICES.read_text())
    assert "NVIDIA H200" in table
    for layers in table.values():
        for layer, choice in layers.items():
            found = key.fullmatch(layer)
            assert found, layer
            direction, *sizes, kind = found.groups()
            channels, height, width, outputs, tall, wide, stride, padding = map(int, sizes)
            g = Geometry(9, 9, channels, height, width, outputs, tall, wide, stride, padding)
            assert convolution.layer_key(direction, g, getattr(torch, kind)) == layer
            assert name.fullmatch(choice), choice


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of choices in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    convolution._stored_choices.cache_clear()
    yield tmp_path / "cache" / "fedexp" / "convolutions.json"
    convolution._stored_choices.cache_clear()


def store_often(number: int) -> None:
    for _ in range(100):
        convolution._store_choice(f"key {number}", "x" * 10_000)


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder is XDG's")
def test_files_of_choices_are_whole_while_processes_write_them(cache_file: Path) -> None:
    store_often(2)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        writers = [pool.submit(store_often, number) for number in range(2)]
        while not all(writer.done() for writer in writers):
            assert json.loads(cache_file.read_bytes())["key 2"] == "x" * 10_000
        for writer in writers:
            writer.result()
    assert os.listdir(cache_file.parent) == ["convolutions.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder is XDG's")
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_of_choices_reads_as_empty_and_is_replaced(
    cache_file: Path, content: bytes
) -> None:
    cache_file.parent.mkdir(parents=True)
    cache_file.write_bytes(content)
    assert convolution._stored_choices() == {}
    convolution._store_choice("key", "each")
    convolution._stored_choices.cache_clear()
    assert convolution._stored_choices() == {"key": "each"}


@pytest.mark.parametrize("has_home", [False, True])
def test_a_choice_that_cannot_be_stored_is_kept_for_the_process(
    cache_file: Path, has_home: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the cache is not a folder, or the user has no home, nothing is raised."""
    if has_home:
        cache_file.parent.parent.write_text("a file where the folder should be")
    else:

        def homeless() -> Path:
            raise RuntimeError

        monkeypatch.setattr(convolution, "user_cache", homeless)
    assert convolution._stored_choices() == {}
    convolution._store_choice("key", "each")
    assert convolution._stored_choices() == {"key": "each"}
    convolution._stored_choices.cache_clear()
    assert convolution._stored_choices() == {}
