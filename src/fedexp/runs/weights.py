"""Weights on the disk: the models of finished runs, weights to start from, and saved states."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor, nn

from fedexp.engine import SimulationState
from fedexp.engine.warm_start import named_weights
from fedexp.errors import DamagedError, UsageError, require
from fedexp.experiment import Experiment, PathLike, Start
from fedexp.objective import ModuleObjective
from fedexp.objective.models import built_model
from fedexp.runs.checkpoint import client_tensors, clients_from, model_tensors, section, state_from
from fedexp.runs.folder import MODEL, RESULT
from fedexp.runs.spec import TRIALS, read_spec
from fedexp.storage import from_bytes, to_bytes, write_bytes
from fedexp.tasks.task import Task

CPU = torch.device("cpu")


def load_model(
    folder: PathLike, model: Callable[[], nn.Module] | nn.Module | None = None
) -> nn.Module:
    """Return the trained model of a finished run, on the CPU.

    Args:
        folder: the run folder.
        model: the class, a function or a module to load the weights into. When None the task of the
            run is built again, which imports the file that defines it.
    """
    path = Path(folder)
    require(
        not path.is_file(),
        f"{path} is a file; name the folder of a run, or use load_state for a state of save_state",
    )
    weights = run_weights(path)
    if model is None:
        experiment = Experiment.of(read_spec(path)).replace(start=None)
        try:
            task = experiment.problem
        except UsageError as error:
            raise UsageError(f"{error}; or pass the model: load_model(folder, model=Net)") from None
        return module_with(weights, module_of(task, experiment.seed))
    return module_with(
        weights, deepcopy(model) if isinstance(model, nn.Module) else built_model(model)
    )


def save_state(state: SimulationState, path: PathLike) -> None:
    """Write a state to a safetensors file, from which `load_state` continues.

    It holds everything: model, server state and client state.
    """
    require(
        isinstance(state, SimulationState),
        f"save_state takes record.state, not {type(state).__name__}",
    )
    clients = client_tensors(state, state.clients)
    counts = {"round": torch.tensor(state.round), "steps": torch.tensor(state.steps)}
    named = {f"model/{name}": value for name, value in {**counts, **model_tensors(state)}.items()}
    named |= {f"client/{name}": value for name, value in clients.items()}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(Path(path), to_bytes(named))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; choose another path") from None


def load_state(path: PathLike, device: str | torch.device = "cpu") -> SimulationState:
    """Return a state that `save_state` wrote; pass it to `simulate(start=...)`."""
    try:
        tensors = from_bytes(Path(path).read_bytes(), torch.device(device))
        model, client_states = section(tensors, "model/"), section(tensors, "client/")
        clients = sorted({int(name.partition("/")[0]) for name in client_states})
        counts = int(model.pop("round")), int(model.pop("steps"))
        return state_from(*counts, model, clients_from(client_states, clients))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, ArithmeticError):
        raise UsageError(f"{path} is not a state; write it with fedexp.save_state") from None


def run_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a finished run by name."""
    try:
        return from_bytes((folder / MODEL).read_bytes(), CPU)
    except FileNotFoundError:
        read_spec(folder)  # raises where there is no run
        trial = TRIALS in folder.parts and (folder / RESULT).exists()
        again = "run it with restart=True (--restart) to train them"
        require(not trial, f"{folder} is a trial, which stores no weights; {again}")
        raise UsageError(
            f"{folder} has no model yet: the run is not finished; continue it with: "
            f"fedexp resume {folder}"
        ) from None
    except (OSError, ValueError):
        raise DamagedError(f"{folder / MODEL} cannot be read") from None


def module_of(task: Task, seed: int) -> nn.Module:
    if not isinstance(task.objective, ModuleObjective):
        raise UsageError(
            f"task {task.name} has no nn.Module; its weights are one vector, in model.safetensors"
        )
    return deepcopy(task.objective.initial_module(seed))


def module_with(weights: Mapping[str, Tensor], module: nn.Module) -> nn.Module:
    """Load weights into a module: a `state_dict`, perhaps with buffers that are in none."""
    stored, buffers = module.state_dict().keys(), dict(module.named_buffers())
    more = {name for name in weights if name in buffers and name not in stored}
    for name in more:
        buffers[name].data = weights[name].to(buffers[name])
    try:
        module.load_state_dict({n: value for n, value in weights.items() if n not in more})
    except RuntimeError as error:
        lines = str(error).splitlines()
        reason = (lines[1:] or lines)[0].strip()
        raise UsageError(f"the weights do not fit {type(module).__name__}: {reason}") from None
    return module.eval()


def stored_start(start: Start, runs: PathLike | None) -> str:
    """Return the file of weights to start from; those in memory are written beside the runs.

    So that another process can resume the run.
    """
    if isinstance(start, str | os.PathLike):
        return str(start)
    data = to_bytes(named_weights(start))
    # the same path in every process of a job, also where nothing is stored; other users have theirs
    temporary = Path(tempfile.gettempdir()) / f"fedexp-starts-{os.getuid()}"
    folder = temporary if runs is None else Path(runs) / "starts"
    folder.mkdir(mode=0o700 if runs is None else 0o777, parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    if not path.exists():  # other processes may write it at the same time
        unique = path.with_name(f".{uuid4().hex}")
        write_bytes(unique, data)
        os.replace(unique, path)
    return str(path)
