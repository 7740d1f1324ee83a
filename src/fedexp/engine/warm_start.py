"""Warm start: a task whose runs begin with given weights, at round 0 and with fresh state.

The weights come from a record (its output model), a module or a state_dict. They become the initial
model of the task's objective, so that everything which depends on that, such as the fingerprint of
a run, covers them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedexp.engine.state import Record
from fedexp.errors import UsageError, require
from fedexp.identity import tensor_bytes
from fedexp.objective import Buffers, ModuleObjective, StartableObjective
from fedexp.objective.models import all_tensors, has_constants
from fedexp.storage import from_bytes
from fedexp.tasks.task import Task

Weights = Record | nn.Module | Mapping[str, Tensor]


def starting_from(task: Task, start: Weights, seed: int) -> Task:
    """Return the task with these weights as its initial model, whatever the seed.

    Args:
        task: the task.
        start: a record, of any algorithm; a module or a state_dict with the names and shapes of
            the task's model.
        seed: of the run; decides which model the weights are checked against.
    """
    objective = task.objective
    if not isinstance(objective, StartableObjective):
        raise UsageError(
            "this objective cannot start from given weights; give it a method `starting_at`"
        )
    if isinstance(start, Record):
        params, buffers = start.state.output()
        like = objective.initial(seed)
        check_layout((params, *buffers), (like[0], *like[1]))
        params = params.to(like[0])
        buffers = Buffers(*(b.to(other) for b, other in zip(buffers, like[1], strict=True)))
        trained = None if start.task is None else start.task.objective
        if (
            isinstance(objective, ModuleObjective)
            and has_constants(objective.module)
            and isinstance(trained, ModuleObjective)
        ):
            model = start.model()  # its frozen weights may be those of an earlier warm start
            check_names(objective.module, model)
            objective = objective.starting_from(model)
        return replace(task, objective=objective.starting_at(params, buffers))
    if not isinstance(objective, ModuleObjective):
        raise UsageError(
            f"task {task.name} does not train a torch module; start from a record of it"
        )
    check_names(objective.module, start)
    return replace(task, objective=objective.starting_from(start))


def check_layout(start: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Refuse the output model of a record that has other sizes than the task's model."""
    names = ("parameters", "floating-point buffers", "integer buffers")
    for name, one, other in zip(names, start, wanted, strict=True):
        require(
            one.shape == other.shape,
            f"start has {one.numel()} values of {name} where the task's model has "
            f"{other.numel()}; start from a record of the same model",
        )


def check_names(module: nn.Module, start: nn.Module | Mapping[str, Any]) -> None:
    """Refuse weights of other names or shapes than those of the task's model."""
    weights = named_weights(start)
    for name, value in weights.items():
        require(
            isinstance(value, Tensor) or isinstance(start, nn.Module),
            f"{name} of start is {type(value).__name__}, not a tensor; pass a state_dict",
        )
    wanted: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    stored = module.state_dict().keys()  # tied weights have a second name, some buffers none
    for name, value in wanted.items():
        require(
            name in weights or name not in stored,
            f"start has no {name}, which the task's model has; give all of its state_dict",
        )
        shape, expected = list(weights.get(name, value).shape), list(value.shape)
        require(
            shape == expected,
            f"{name} of start has shape {shape} where the task's model has {expected}; start "
            "from a model of the same shapes",
        )
    for name in weights:
        require(
            name in wanted or name in stored,
            f"start has {name}, which the task's model does not have; leave it out",
        )


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights in a safetensors file, or in a run folder, by name."""
    file = Path(path)
    file = file / "model.safetensors" if file.is_dir() else file
    try:
        return from_bytes(file.read_bytes(), torch.device("cpu"))
    except (OSError, ValueError):
        raise UsageError(
            f"there are no weights in {file}; give a finished run or a safetensors file"
        ) from None


def named_weights(start: Weights | str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return all weights to start from, by name."""
    if isinstance(start, str | os.PathLike):
        return read_weights(start)
    weights = start.model() if isinstance(start, Record) else start
    return all_tensors(weights) if isinstance(weights, nn.Module) else dict(weights)


def weights_digest(start: Weights | str | os.PathLike[str]) -> str:
    """Return a digest of weights, whatever the name of their file."""
    digest = hashlib.sha256()
    for name, value in sorted(named_weights(start).items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()[:16]
