"""`convolve`: a convolution in which every client has weights of its own.

Forward and backward dispatch to the fastest implementation for the sizes. Where tf32 would do,
float32 operands are scaled to half precision first, once for all products they take part in
(`convolution_torch`).

Implementations are plain PyTorch (`convolution_torch`) or Triton kernels (`convolution_few`,
`convolution_triton`, `convolution_tma`). On a GPU the choice for a layer comes from a table of
known layers and cards (`choices.json`, written by `tools/kernel_choices.py`). For other layers a
few likely implementations are timed, and the choice is stored for the process and, by card and
versions, on disk. On a CPU, and with deterministic algorithms, nothing is timed: the first
candidate is used, so that a run gives the same bits every time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedexp.kernels.convolution_torch import (
    Geometry,
    PerClient,
    Unfold,
    Units,
    has_few_channels,
    scaled_images,
    scaled_weights,
    takes_scaled,
)
from fedexp.kernels.launch import differentiable, has_triton, is_compiling
from fedexp.kernels.layers import gradient_buffer
from fedexp.storage import parse_json, replacing, user_cache

Direction = Literal["forward", "input_gradient", "weight_gradient"]
# Takes two tensors and a Geometry; some take a gradient `buffer` or the `units` of scaled operands.
Implementation = Callable[..., Tensor]

CHOICES = Path(__file__).with_name("choices.json")
WORTH_MEASURING = 10**9  # operations; anything smaller takes too little time to measure
_chosen: dict[tuple[object, ...], Implementation] = {}


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """Return the convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW].

    `bias` is [K, O]. The images of a client are consecutive. On a GPU the result is channels last.

    >>> x, w = torch.ones(2, 1, 3, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    >>> convolve(x, w)[:, 0, 0, 0].tolist()
    [1.0, 2.0]
    """
    y = differentiable(_Convolution, _images(x), weight, stride, padding)
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(weight), dim=0)[:, :, None, None]


def convolve_relu(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int
) -> Tensor | None:
    """Return relu(convolution + bias) in one pass; None where that is not faster.

    It is for the first layer of a network, whose few channels make memory traffic most of the time.
    """
    g = _geometry(x.shape, weight.shape, stride, padding)
    exact = x.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    if exact or x.dtype == torch.float64 or x.requires_grad or not has_few_channels(g):
        return None
    if not (x.is_cuda and has_triton()):
        return None
    from fedexp.kernels.convolution_few import ConvolutionReLU

    return differentiable(ConvolutionReLU, _images(x), weight, bias, g)


class _Convolution(torch.autograd.Function):
    """Images and weights are saved for the backward pass as they were multiplied: maybe scaled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
        g = ctx.geometry = _geometry(x.shape, w.shape, stride, padding)
        if not takes_scaled(x, g):
            ctx.save_for_backward(x, w, w, None, None)
            return dispatch("forward", x, w, g)
        (images, unit_x), (weights, unit_w) = scaled_images(x, g.clients), scaled_weights(w)
        ctx.save_for_backward(images, weights, w, unit_x, unit_w)
        return dispatch("forward", images, weights, g, (unit_x, unit_w))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        images, weights, w, unit_x, unit_w = ctx.saved_tensors
        g, dy = ctx.geometry, _images(dy)
        input_units, weight_units = None, None
        if unit_x is not None:
            dy, unit = scaled_images(dy, g.clients)
            input_units, weight_units = (unit, unit_w), (unit, unit_x)
        # the address of the weights before scaling identifies the gradient buffer
        dw = dispatch("weight_gradient", dy, images, g, weight_units, gradient_buffer(w))
        if not ctx.needs_input_grad[0]:
            return None, dw, None, None
        return dispatch("input_gradient", dy, weights, g, input_units), dw, None, None


def _geometry(x: torch.Size, w: torch.Size, stride: int, padding: int) -> Geometry:
    clients, outputs, channels, tall, wide = w
    images, _, height, width = x
    sizes = (clients, images // clients, channels, height, width, outputs, tall, wide)
    return Geometry(*sizes, stride, padding)


def _images(x: Tensor) -> Tensor:
    """Return images in the memory format of the implementations: channels last on a GPU."""
    return x.contiguous(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)


def dispatch(
    direction: Direction, a: Tensor, b: Tensor, g: Geometry, units: Units | None = None,
    buffer: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the convolution, or a gradient, by the implementation for these sizes.

    Args:
        direction: what to compute: of (x, w) the result, of (dy, w) or (dy, x) a gradient.
        units: of scaled operands; the result is not scaled.
        buffer: where to write a weight gradient, if the implementation can.
    """
    scales: dict[str, Any] = {} if units is None else {"units": units}
    implementation = _implementation(direction, a, b, g, scales)
    if buffer is not None and _takes_buffer(implementation):
        return implementation(a, b, g, buffer=buffer, **scales)
    return implementation(a, b, g, **scales)


def _implementation(
    direction: Direction, a: Tensor, b: Tensor, g: Geometry, scales: dict[str, Any]
) -> Implementation:
    """Return the implementation for these sizes; `a`, `b` and `scales` are its arguments."""
    exact = a.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    fixed = torch.are_deterministic_algorithms_enabled()
    key = (direction, g, a.dtype, a.device, exact, fixed)
    layer = (direction, replace(g, clients=0, batch=0), *key[2:])
    # evaluation takes what training has, unless that depends on what was trained before
    if g.clients == 1 and layer in _chosen and not fixed:
        return _chosen[layer]
    if key in _chosen:
        return _chosen[key]
    names = _shortlist(direction, a, g, exact)
    if is_compiling():
        return partial(_compile_all, [implementation_named(name, direction) for name in names])
    if len(names) > 1:
        names = [_fastest(names, direction, a, b, g, scales)]
        _store_choice(_key(direction, a, g), names[0])
    _chosen[key] = implementation_named(names[0], direction)
    if g.clients > 1:
        _chosen[layer] = _chosen[key]
    return _chosen[key]


def _shortlist(direction: Direction, a: Tensor, g: Geometry, exact: bool) -> list[str]:
    """Return the names of the implementations to time; one where the choice is known or fixed."""
    names = candidates(direction, a, g, exact)
    if len(names) == 1 or not a.is_cuda:
        return names[:1]
    if known := known_choice(direction, g, a.dtype):
        return [known]
    # a trial compiles for the run, whose layers may be larger
    small = g.flops < WORTH_MEASURING and not is_compiling()
    if small or torch.are_deterministic_algorithms_enabled():
        return names[:1]
    stored = _stored_choices().get(_key(direction, a, g))
    return [stored] if stored in names else names


def _compile_all(
    implementations: list[Implementation], a: Tensor, b: Tensor, g: Geometry, **scales: Any
) -> Tensor:
    """Compile every implementation; the result has the right shape and undefined values."""
    results = [each(a, b, g, **scales) for each in implementations]
    return results[0]


def _takes_buffer(implementation: Implementation) -> bool:
    """Return whether a weight gradient can be written to a given buffer: by tiles or boxes."""
    return isinstance(implementation, partial) and implementation.func is not _compile_all


def candidates(direction: Direction, a: Tensor, g: Geometry, exact: bool) -> list[str]:
    """Return the names of the implementations worth timing, the likeliest first."""
    if not a.is_cuda or (g.clients == 1 and direction != "forward"):
        return ["each"]
    if exact or a.dtype == torch.float64:
        return ["each"]
    if not has_triton():
        return ["each", "unfold"]
    from fedexp.kernels.convolution_tma import likely_boxes
    from fedexp.kernels.convolution_triton import likely_tilings

    if has_few_channels(g) and direction != "input_gradient":
        return ["few", "unfold"]
    boxes = likely_boxes(direction, g, a.element_size())
    tiled = likely_tilings(direction, g, a.element_size())
    tiled = [*boxes, *tiled[:1]] if boxes else tiled
    # for a single client, as in evaluation, cuDNN may be faster
    return [*tiled, "each"] if a.element_size() == 4 or g.clients == 1 else tiled


def implementation_named(name: str, direction: Direction) -> Implementation:
    """Return an implementation by its name.

    A name is "each" (client by client), "unfold", "few" (channels), a tiling such as
    "128x64x64w4s3" (`convolution_triton.name_of`) or a box (`convolution_tma.name_of`).
    """
    if name in ("each", "unfold"):
        plain: Implementation = getattr(PerClient() if name == "each" else Unfold(), direction)
        return plain
    from fedexp.kernels import convolution_few, convolution_tma, convolution_triton

    if name == "few":
        few: Implementation = getattr(convolution_few, direction)
        return few
    if name.startswith("box"):
        box = convolution_tma.box_named(name)
        return partial(getattr(convolution_tma, direction), box=box)
    tiling = convolution_triton.tiling_named(name)
    return partial(getattr(convolution_triton, direction), tiling=tiling)


def _fastest(
    names: list[str], direction: Direction, a: Tensor, b: Tensor, g: Geometry,
    scales: dict[str, Any],
) -> str:  # fmt: skip
    """Return the name of the fastest implementation: the best of three times five calls of each.

    Calls are captured in a CUDA graph, as in training: launching a kernel from the host may take
    longer than the kernel.
    """
    times = {}
    with _synchronization(), torch.no_grad():
        for name in names:
            implementation = implementation_named(name, direction)
            implementation(a, b, g, **scales)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # the backward pass has its own thread, and other threads may be using the GPU
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for _ in range(5):
                    implementation(a, b, g, **scales)
            times[name] = min(_milliseconds(graph) for _ in range(3))
    return min(times, key=lambda name: times[name])


@contextmanager
def _synchronization() -> Iterator[None]:
    """Allow to wait for the device, also where a caller watches for it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def known_choice(direction: str, g: Geometry, dtype: torch.dtype) -> str | None:
    """Return the name of the implementation in the table of known layers, for this card.

    It does not depend on the number of clients and images, so that a trial compiles what the run
    needs.
    """
    return _known_choices(torch.cuda.get_device_name()).get(layer_key(direction, g, dtype))


def layer_key(direction: str, g: Geometry, dtype: torch.dtype) -> str:
    """Return the key of a layer in the table.

    >>> layer_key("forward", Geometry(20, 50, 64, 32, 32, 64, 3, 3, padding=1), torch.bfloat16)
    'forward 64x32x32-64 3x3 stride 1 padding 1 bfloat16'
    """
    sizes = f"{g.channels}x{g.height}x{g.width}-{g.outputs} {g.kernel_height}x{g.kernel_width}"
    kind = str(dtype).removeprefix("torch.")
    return f"{direction} {sizes} stride {g.stride} padding {g.padding} {kind}"


@cache
def _known_choices(card: str) -> dict[str, str]:
    table: dict[str, dict[str, str]] = json.loads(CHOICES.read_text())
    return table.get(card, {})


def _key(direction: Direction, a: Tensor, g: Geometry) -> str:
    return f"{_machine()} {direction} {g} {a.dtype}"


@cache
def _machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}"


@cache
def _stored_choices() -> dict[str, str]:
    """Return the choices of earlier processes; none where the file cannot be read."""
    try:
        stored = parse_json(_choices_file().read_bytes())
    except (OSError, ValueError, RuntimeError):
        return {}
    return stored if isinstance(stored, dict) else {}


def _store_choice(key: str, name: str) -> None:
    """Store a choice for the next process, which measures again where nothing can be written."""
    _stored_choices()[key] = name
    with suppress(OSError, RuntimeError):
        file = _choices_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file, locked=False) as scratch:
            scratch.write(json.dumps(_stored_choices(), indent=1).encode())


def _choices_file() -> Path:
    """Return the file of timed choices; a RuntimeError for a user without a home folder."""
    return user_cache() / "fedexp" / "convolutions.json"
