"""What a model or a loss holds besides trained parameters and buffers: aliases and hidden state.

A run sets parameters and buffers before every call and carries them from round to round; nothing
else is set, averaged or stored. So a tensor that shares its memory with a parameter does not follow
it, and what forward or the loss changes elsewhere makes results depend on earlier calls: they
differ between two runs of one seed, and after a resumption. Both are refused.
"""

from __future__ import annotations

import hashlib
import pickle
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import combinations
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from fedexp.data.federation import Batch
from fedexp.data.transforms import Transform
from fedexp.errors import require
from fedexp.identity import GENERATORS, parts, tensor_bytes
from fedexp.objective.losses import overrides
from fedexp.seeding import seeded_torch

if TYPE_CHECKING:  # it imports this file
    from fedexp.objective.module import ModuleObjective

LEAVES = (Tensor, np.ndarray, np.generic, bool, int, float, complex, str, *GENERATORS)
METRIC = ("update", "compute", "reset")  # of torchmetrics: what a loss reports, not what it uses
PERTURBED = 0.05  # of the weights' root mean square: a mean teacher starts at the initial weights
ROUNDING = 64  # units in the last place, where the order of a sum is not fixed
LARGE_BYTES = 2**20  # of a tensor that is summed up
EXAMPLES, SHOWN = 4, 3  # of the data, two in a call; names in a message

_repeatable: WeakSet[ModuleObjective] = WeakSet()  # runs of a task share one check


def check_aliases(module: nn.Module) -> None:
    """Refuse tensors that do not follow the parameters, which get new memory at every call."""
    trained = {id(p) for p in module.parameters() if p.requires_grad}
    in_memory: defaultdict[int, dict[int, tuple[str, Tensor]]] = defaultdict(dict)
    for name, value in leaves(module):
        if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
            continue
        require(
            value.is_leaf or not _depends_on(value, trained),
            f"{name} of the model was computed from weights and does not follow them in training; "
            "compute it in forward, or detach what is only kept for inspection",
        )
        if value.layout == torch.strided and value.numel():
            in_memory[value.untyped_storage().data_ptr()].setdefault(id(value), (name, value))
    for tensors in in_memory.values():
        may_overlap = len(tensors) > 1 and not trained.isdisjoint(tensors)
        if not may_overlap or not _overlap(*(value for _, value in tensors.values())):
            continue
        for (name, one), (other_name, other) in combinations(tensors.values(), 2):
            count = len(trained & {id(one), id(other)})
            remedy = "register one nn.Parameter in both places"
            if count == 1:
                remedy = "compute one from the other in forward, or copy it by clone()"
            require(
                not count or not _overlap(one, other),
                f"{name} and {other_name} of the model share their memory, which training does not "
                f"keep; {remedy}",
            )


def _depends_on(value: Tensor, trained: set[int]) -> bool:
    """Return whether a tensor was computed from one of the trained parameters."""
    waiting, visited = [value.grad_fn], set[Any]()
    while waiting:
        function = waiting.pop()
        if function is None or function in visited:
            continue
        visited.add(function)
        if id(getattr(function, "variable", None)) in trained:  # where a graph begins
            return True
        waiting += [before for before, _ in function.next_functions]
    return False


def _overlap(*tensors: Tensor) -> bool:
    """Return whether some of the tensors in one memory have a byte in common."""
    counts = torch.zeros(tensors[0].untyped_storage().nbytes(), dtype=torch.int16)
    for tensor in tensors:
        size, strides = tensor.element_size(), tensor.stride()
        shape = [n if step else 1 for n, step in zip(tensor.shape, strides, strict=True)]
        at = [step * size for step in strides]
        counts.as_strided((*shape, size), (*at, 1), tensor.storage_offset() * size).add_(1)
    return bool((counts > 1).any())


def check_repeatable(
    objective: ModuleObjective, seed: int, examples: Batch, transform: Transform | None = None
) -> None:
    """Refuse a model or a loss with state that is neither a trained parameter nor a buffer.

    One gradient is computed three times, a second one before and in between, and likewise an
    evaluation. What forward leaves for inspection and caches that it fills are alike after all
    three; a counter, a running mean and a frozen teacher are not. Lists may grow, e.g. by recorded
    losses, if results are alike. State that changes on rare examples alone is not noticed.

    Args:
        objective: is copied for the calls; layers of torch and of this package need no check.
        seed: of the initial weights; those of the calls differ a little.
        examples: of which the first four are used.
        transform: is applied to them.
    """
    parts = (*objective.module.modules(), objective.loss)
    if objective in _repeatable or all(_is_stateless(part) for part in parts):
        return
    batch = {name: value[:EXAMPLES] for name, value in examples.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = batch if transform is None else dict(transform.evaluate(batch))
            error = _hidden_state(objective, seed, batch)
    except Exception:  # whatever a model raises; it does so in the run, which names the remedy
        return
    require(not error, error)
    _repeatable.add(objective)


def _is_stateless(part: Any) -> bool:
    """Return whether a layer or a loss is one of torch or of this package, without hooks."""
    part = part.func if isinstance(part, partial) else part
    defined = part if isinstance(part, FunctionType) else type(part)
    changed = isinstance(part, nn.Module) and overrides(part)
    return str(defined.__module__).partition(".")[0] in ("torch", "fedexp") and not changed


def _hidden_state(objective: ModuleObjective, seed: int, batch: Batch) -> str:
    """Return the error for hidden state; empty where there is none."""
    start, buffers = objective.initial(seed)
    probe, width = objective.copy(dropout=False), start.square().mean().sqrt().item() or 1.0
    with seeded_torch(seed, "trial"):
        moved = start + PERTURBED * width * torch.randn_like(start)
    one, other = ({n: v[part] for n, v in batch.items()} for part in (slice(2), slice(-2, None)))
    calls = ((start, other), (moved, one), (moved, one), (start, other), (moved, one))

    def gradient(params: Tensor, batch: Batch) -> Tensor:
        grad, after = probe.gradient(params.clone(), buffers, batch)
        return torch.cat([grad, after.averaged.to(grad)])

    def losses(params: Tensor, batch: Batch) -> Tensor:
        return probe.measure(params, buffers, batch)["loss"]

    before = _contents(probe)
    for compute in (gradient, losses):
        results, contents = [], []
        for params, batch in calls:
            with seeded_torch(seed, "trial"):
                value = compute(params, batch).double()
            if batch is one:
                results.append(value)
                contents.append(_contents(probe))
        last = contents[-1]
        names = [n for n in last if any(c.get(n, last[n]) != last[n] for c in contents)]
        rounding = ROUNDING * torch.finfo(start.dtype).eps * value.norm()
        if names or any((value - result).norm() > rounding for result in results):
            names = names or [n for n in last if last[n] != before.get(n)]
            what = ", ".join(names[:SHOWN]) or "something that is not an attribute"
            return (
                f"forward or the loss changes {what} in every call, on which results may depend; "
                "hold it in a buffer of the model (register_buffer), which is averaged and stored, "
                "or compute it in every call; draws of torch's default generator are seeded"
            )
        before = last
    return ""


def _contents(objective: ModuleObjective) -> dict[str, bytes]:
    """Return a digest of everything that no run sets, by name."""
    module = objective.module
    carried = {id(p) for p in module.parameters() if p.requires_grad}
    carried |= {id(b) for b in module.buffers() if not b.is_complex()}
    contents: defaultdict[str, bytes] = defaultdict(bytes)  # of all values of one name
    for what, root in {"model": module, "loss": objective.loss}.items():
        for name, value in leaves(root):
            if id(value) not in carried:
                contents[f"{name} of the {what}"] += _digest(value)
    return contents


def _digest(value: Any) -> bytes:
    """Return a digest of a value; nothing for one that cannot be compared."""
    with suppress(Exception):  # of what a user's object raises when it is pickled
        value = value.get_state() if isinstance(value, torch.Generator) else value
        if not (isinstance(value, Tensor) and value.layout == torch.strided):
            return pickle.dumps(value.detach() if isinstance(value, Tensor) else value)
        data = tensor_bytes(value)
        # hashing takes ten times as long
        summed = len(data) // 8 * 8 if len(data) >= LARGE_BYTES else 0
        total = int(np.frombuffer(data[:summed], np.int64).sum())
        rest = hashlib.blake2b(data[summed:])
        return total.to_bytes(8, "big", signed=True) + rest.digest()
    return b""


def leaves(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers, texts and generators inside a value with their names; no arrays."""
    visited: dict[int, Any] = {}  # with the values, so that no other value gets their ids
    waiting = deque([("", root)])
    while waiting:
        name, value = waiting.popleft()
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an array that cannot be written to
                value = torch.from_numpy(value)
        if isinstance(value, LEAVES):
            yield name, value
        elif id(value) not in visited and not all(hasattr(value, method) for method in METRIC):
            visited[id(value)] = value
            inside = [(type(value).__name__, type(value)), *(parts(value) or ())]
            waiting += [(f"{name}.{key}".strip("."), part) for key, part in inside]
