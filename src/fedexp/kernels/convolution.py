"""Which form of a convolution to use: by rule, and on a GPU by measurement among the likely ones.

A measurement is kept for the process and, by card and versions, on disk. Nothing is measured on a
CPU or where deterministic algorithms are asked for: there the first candidate is taken, so that a
run gives the same bits every time.

`convolve`: a convolution in which every client has weights of its own.

The way there and the way back are operators of their own for torch, opaque to compilers, and take
the forms that are fastest for their sizes. Where tf32 would do, operands are scaled to half
precision, once for all products they are part of.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedexp.kernels.convolution_torch import (
    Geometry,
    OneByOne,
    Unfolded,
    Units,
    has_few_channels,
    scaled_images,
    scaled_weights,
    takes_scaled,
)
from fedexp.kernels.launch import has_triton, is_compiling
from fedexp.kernels.layers import room_for

Direction = Literal["forward", "input_gradient", "weight_gradient"]
Form = Callable[..., Tensor]  # of two tensors, a Geometry, and maybe a room and units

WORTH_MEASURING = 10**9  # operations; less is over before a clock could tell
_chosen: dict[tuple[object, ...], Form] = {}


def convolved(
    direction: Direction, a: Tensor, b: Tensor, g: Geometry, units: Units | None = None,
    room: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The convolution, or a gradient, by the form for these sizes; in its room if it can.

    With `units` the operands are scaled, and the result is not.
    """
    scales: dict[str, Any] = {} if units is None else {"units": units}
    form = chosen_form(direction, a, b, g, scales)
    if room is not None and _writes_to_rooms(form):
        return form(a, b, g, room=room, **scales)
    return form(a, b, g, **scales)


def chosen_form(
    direction: Direction, a: Tensor, b: Tensor, g: Geometry, scales: dict[str, Any]
) -> Form:
    """The form for these sizes; `a`, `b` and `scales` are what it is called with."""
    exact = a.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    key = (direction, g, a.dtype, a.device, exact)
    if key in _chosen:
        return _chosen[key]
    if is_compiling():
        return partial(
            _compile_all, [named_form(n, direction) for n in _open(direction, a, g, exact)]
        )
    _chosen[key] = _choose(direction, a, b, g, exact, scales)
    return _chosen[key]


def _compile_all(forms: list[Form], a: Tensor, b: Tensor, g: Geometry, **scales: Any) -> Tensor:
    """Have every form compiled; the result is of the right shape, and not written."""
    results = [form(a, b, g, **scales) for form in forms]
    return results[0]


def _open(direction: Direction, a: Tensor, g: Geometry, exact: bool) -> list[str]:
    """The candidates between which the choice is still open."""
    names = candidates(direction, a, g, exact)
    known = _read().get(_key(direction, a, g)) if a.is_cuda and len(names) > 1 else None
    return [known] if known in names else names


def _choose(
    direction: Direction, a: Tensor, b: Tensor, g: Geometry, exact: bool, scales: dict[str, Any]
) -> Form:
    names = candidates(direction, a, g, exact)
    fixed = torch.are_deterministic_algorithms_enabled() or g.flops < WORTH_MEASURING
    if len(names) > 1 and a.is_cuda and not fixed:
        known, key = _read(), _key(direction, a, g)
        if known.get(key) not in names:
            with torch.no_grad():
                forms = {name: named_form(name, direction) for name in names}
                times = _measure(forms, a, b, g, scales)
            known[key] = min(times, key=lambda name: times[name])
            _write(key, known[key])
        return named_form(known[key], direction)
    return named_form(names[0], direction)


def candidates(direction: Direction, a: Tensor, g: Geometry, exact: bool) -> list[str]:
    """The names of the forms worth trying, the likeliest first."""
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
    boxed = likely_boxes(direction, g, a.element_size())
    tiled = likely_tilings(direction, g, a.element_size())
    tiled = [*boxed, *tiled[:1]] if boxed else tiled
    # of one client alone, as in evaluation, libraries may be the faster
    return [*tiled, "each"] if a.element_size() == 4 or g.clients == 1 else tiled


def named_form(name: str, direction: Direction) -> Form:
    """A form by its name: each, unfold, few, a tiling (128x64x64w4s3) or a box (see `boxes`)."""
    if name in ("each", "unfold"):
        form: Form = getattr(OneByOne() if name == "each" else Unfolded(), direction)
        return form
    if name == "few":
        from fedexp.kernels import convolution_few

        few: Form = getattr(convolution_few, direction)
        return few
    from fedexp.kernels.convolution_tma import boxed_form
    from fedexp.kernels.convolution_triton import tiled_form

    if "box" in name:
        return boxed_form(name, direction)
    return tiled_form(name, direction)


def _writes_to_rooms(form: Form) -> bool:
    """Whether the form of a weight gradient can be told where to write it: tiled ones can."""
    return isinstance(form, partial) and form.func is not _compile_all


def _measure(
    forms: dict[str, Form], a: Tensor, b: Tensor, g: Geometry, scales: dict[str, Any]
) -> dict[str, float]:
    """Milliseconds of each form, the best of three times five calls.

    As a graph, in which forms will run: a launch by the host may take longer than its kernel.
    """
    times = {}
    for name, form in forms.items():
        form(a, b, g, **scales)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # the backward pass has a thread of its own, and others may be at work
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(5):
                form(a, b, g, **scales)
        times[name] = min(_milliseconds(graph) for _ in range(3)) / 5
    return times


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _key(direction: Direction, a: Tensor, g: Geometry) -> str:
    return f"{_machine()} {direction} {g} {a.dtype}"


@cache
def _machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}"


def _file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fedexp" / "convolutions.json"


@cache
def _read() -> dict[str, str]:
    try:
        known = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(key: str, name: str) -> None:
    """Keep a choice for the next process; where it cannot be written, it is measured again."""
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({**_read(), key: name}, indent=1))
        partial.replace(file)
    except OSError:
        return


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0
) -> Tensor:
    """The convolution of images [K * B, C, H, W] with weights [K, O, C, KH, KW], bias [K, O].

    The images of a client are consecutive. On a GPU the result has its channels last in memory.

    >>> x, w = torch.ones(2, 1, 3, 3), torch.tensor([1.0, 2.0]).view(2, 1, 1, 1, 1)
    >>> convolve(x, w)[:, 0, 0, 0].tolist()
    [1.0, 2.0]
    """
    y: Tensor = _convolution(_images(x), weight, stride, padding)[0]
    if bias is None:
        return y
    return y + bias.repeat_interleave(len(x) // len(weight), dim=0)[:, :, None, None]


@torch.library.custom_op("fedexp::convolution", mutates_args=())
def _convolution(
    x: Tensor, w: Tensor, stride: int, padding: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result; and scaled images, scaled weights and their units, empty if nothing is scaled."""
    g = _geometry(x.shape, w.shape, stride, padding)
    if not takes_scaled(x, g):
        return convolved("forward", x, w, g), x.new_empty(0), x.new_empty(0), x.new_empty(0)
    (images, unit_x), (weights, unit_w) = scaled_images(x, g.clients), scaled_weights(w)
    y = convolved("forward", images, weights, g, (unit_x, unit_w))
    return y, images, weights, torch.stack([unit_x, unit_w])


@torch.library.custom_op("fedexp::convolution_gradients", mutates_args=())
def _gradients(
    dy: Tensor, images: Tensor, weights: Tensor, units: Tensor, w: Tensor, stride: int,
    padding: int, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of the images, if `back`, and of the weights; `w` tells where these are wanted."""
    g = _geometry(images.shape, w.shape, stride, padding)
    for_images, for_weights = None, None
    if units.numel():
        dy, unit = scaled_images(dy, g.clients)
        for_images, for_weights = (unit, units[1]), (unit, units[0])
    dw = convolved("weight_gradient", dy, images, g, for_weights, room_for(w))
    if not back:
        return dw.new_empty(0), dw
    return convolved("input_gradient", dy, weights, g, for_images), dw


@_convolution.register_fake
def _(x: Tensor, w: Tensor, stride: int, padding: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = _geometry(x.shape, w.shape, stride, padding)
    y = _images(x.new_empty(len(x), g.outputs, g.out_height, g.out_width))
    if not takes_scaled(x, g):
        return y, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    images = torch.empty_like(x, dtype=torch.float16, memory_format=torch.channels_last)
    return y, images, _like_weights(w, torch.float16), x.new_empty(2, g.clients)


@_gradients.register_fake
def _(
    dy: Tensor, images: Tensor, weights: Tensor, units: Tensor, w: Tensor, stride: int,
    padding: int, back: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx = _images(dy.new_empty(images.shape)) if back else dy.new_empty(0)
    return dx, _like_weights(w, dy.dtype)


def _like_weights(w: Tensor, kind: torch.dtype) -> Tensor:
    clients, outputs, channels, *window = w.shape
    return w.new_empty(clients, outputs, *window, channels, dtype=kind).movedim(-1, 2)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, ctx.stride, ctx.padding = inputs
    _, images, weights, units = output
    ctx.set_materialize_grads(False)  # nobody needs zeros for what is only kept
    if units.numel():
        ctx.save_for_backward(images, weights, units, w)
    else:
        ctx.save_for_backward(x, w, units, w)


def _backward(
    ctx: Any, dy: Tensor | None, *unused: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:  # nothing depends on the result
        return None, None, None, None
    wanted = ctx.needs_input_grad[0]
    dx, dw = _gradients(_images(dy), *ctx.saved_tensors, ctx.stride, ctx.padding, wanted)
    return dx if wanted else None, dw, None, None


_convolution.register_autograd(_backward, setup_context=_remember)


def _geometry(x: torch.Size, w: torch.Size, stride: int, padding: int) -> Geometry:
    clients, outputs, channels, tall, wide = w
    images, _, height, width = x
    sizes = (clients, images // clients, channels, height, width, outputs, tall, wide)
    return Geometry(*sizes, stride, padding)


def _images(x: Tensor) -> Tensor:
    """As the forms write them: channels last on a GPU, as they come elsewhere."""
    return x.contiguous(memory_format=torch.channels_last if x.is_cuda else torch.contiguous_format)
