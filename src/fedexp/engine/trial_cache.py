"""`TrialCache`: engines that were verified by an earlier process, so that a start is not delayed.

The trial of an engine (`trial.py`) compares two programs on a few examples. Where both consist of
code of torch and of this package alone, its outcome follows from the versions, the device, the
layers and settings and the shapes; so does the name of a small file in the user's cache folder that
is written after a trial has succeeded, and that the next process looks for instead of a trial.

Code of the user (a module, a loss, a transform, a client rule, a hook, a function of torch or of
this package that was replaced) has no version, so its trial is made every time. So is the trial of
anything that cannot be described by value, and of data that are streamed. Failures are not stored.

The learning rate, its schedule over rounds and the seed are not part of the key: a trial chooses
its own step size, and neither weights nor examples of one seed are better evidence than those of
another. Their magnitudes are, since kernels compute with scaled half precision.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import sys
import types
from collections.abc import Hashable, Iterator
from datetime import UTC, date, datetime
from enum import Enum
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as module_base
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fedexp
from fedexp.data.streaming import StreamedFederation
from fedexp.engine.plan import Work
from fedexp.engine.programs import PLAIN, Identity, SharedPrograms
from fedexp.engine.state import SimulationState
from fedexp.kernels.disk_cache import cache_file, drop_oldest, read_json, write_json
from fedexp.objective import CopyableObjective
from fedexp.objective.hidden_state import HOOKS
from fedexp.precision import Precision

MOST_FILES = 256
# Packages that no trial calls.
NOT_TRIED = {"analysis", "cli", "distributed", "flower", "privacy"}
NOT_TRIED |= {"reproduce", "runs", "study", "tuning"}
VERSIONED = {"torch", "fedexp"}  # packages whose classes and functions may take part
# Packages whose functions may be attributes of those.
KNOWN = (VERSIONED | {"numpy", "triton", "typing_extensions"} | sys.stdlib_module_names) - {
    "unittest"
}
LIBRARY = os.path.dirname(os.__file__) + os.sep  # of Python
GLOBAL_HOOKS = [f"_global{name}" for name in HOOKS]
VARIABLES = ("CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "TORCH_", "TRITON_")
DRIVER = Path("/proc/driver/nvidia/version")

log = logging.getLogger("fedexp")


class UserCodeError(Exception):
    """A program has parts that no version identifies."""


class TrialCache:
    """The trials of one run that an earlier process may have made.

    Args:
        work: the first round.
        state: the state before it.
        precision: of the run.
    """

    def __init__(self, work: Work, state: SimulationState, precision: Precision) -> None:
        self._origin, self._precision = (work, state), precision

    def find(self, candidate: tuple[str, ...]) -> date | None:
        """Return when an engine was verified; None if it was not, or not for certain.

        Args:
            candidate: names the engine and its implementation.
        """
        if (digest := self._digest(candidate)) is None:
            return None
        stored = read_json(cache_file("trials", f"{digest}.json"))
        if stored.get("key") != digest:
            return None
        try:
            return date.fromisoformat(stored["verified"])
        except (KeyError, TypeError, ValueError):
            return None

    def store(self, candidate: tuple[str, ...]) -> None:
        """Store that an engine agrees with the loop, where no code of the user takes part."""
        digest, today = self._digest(candidate), datetime.now(UTC).date().isoformat()
        file = cache_file("trials", f"{digest}.json")
        if digest is None or file is None:
            return
        versions = f"fedexp {fedexp.__version__}, torch {torch.__version__}"  # for readers
        engine = ", ".join(candidate)
        content = {"key": digest, "verified": today, "engine": engine, "versions": versions}
        write_json(file, content)
        drop_oldest(file.parent, MOST_FILES)

    def _digest(self, candidate: tuple[str, ...]) -> str | None:
        """Return the digest of all that a trial depends on; None if that is not known."""
        if self._shared is None:
            return None
        try:
            key = SharedPrograms.trial_key(candidate, *self._origin, self._precision)
            text = canonical(key)
        except UserCodeError as error:
            log.debug("this engine is verified in every run: %s", error)
            return None
        return hashlib.sha256(f"{self._shared}\n{text}".encode()).hexdigest()

    @cached_property
    def _shared(self) -> str | None:
        """What all trials of the run depend on besides their keys; None with code of the user."""
        work, state = self._origin
        try:
            _check_model(work)
            _check_replaced()
            _check_modes()
            fields = {name: _range(value) for name, value in work.task.train.fields.items()}
            shared = environment(state.params.device)
        except (UserCodeError, OSError) as error:
            log.debug("engines are verified in every run: %s", error)
            return None
        sizes = [_magnitude(each) for each in (state.params, state.buffers.averaged)]
        return repr((shared, fields, sizes))


# What a trial depends on ------------------------------------------------------------------------


def canonical(key: Hashable) -> str:
    """Return a key as text that is the same in every process; raises `UserCodeError`.

    >>> from fedexp.engine.programs import frozen_key
    >>> canonical(frozen_key((1, None, torch.float32)))
    '(builtins.tuple,((builtins.int,1),(builtins.NoneType,None),(torch.dtype,torch.float32)))'
    """
    return _canonical(key, set())


def _canonical(key: Hashable, checked: set[type]) -> str:
    """Return the text of a key; `checked` are the classes met before."""
    if isinstance(key, tuple):
        return f"({','.join(_canonical(each, checked) for each in key)})"
    if isinstance(key, frozenset):
        return f"{{{','.join(sorted(_canonical(each, checked) for each in key))}}}"
    if isinstance(key, Identity):
        return _name_of(key.held)
    if isinstance(key, type):
        if key not in checked:
            _check_class(key)
            checked.add(key)
        return f"{key.__module__}.{key.__qualname__}"
    if isinstance(key, Enum):
        return f"{_canonical(type(key), checked)}.{key.name}"
    if type(key) in PLAIN:
        return repr(key)
    raise UserCodeError(f"{type(key).__name__} is not described by value")


def _name_of(held: Any) -> str:
    """Return the name of an object that keys compare by identity: a function or its module."""
    if isinstance(held, types.CodeType):
        code = hashlib.sha256(held.co_code).hexdigest()
        return f"{held.co_qualname}:{held.co_firstlineno}:{code}"
    if isinstance(held, dict):  # the globals of a function
        name = str(held.get("__name__"))
        if name in sys.modules and vars(sys.modules[name]) is held and _root(name) in VERSIONED:
            return name
        raise UserCodeError(f"a function is defined in {name}")
    if isinstance(held, types.BuiltinFunctionType):  # e.g. torch.relu
        name = held.__name__
        for space in ("torch", "torch._C._nn"):
            if vars(sys.modules[space]).get(name) is held:
                return f"{space}.{name}"
    raise UserCodeError(f"an object of {type(held).__name__} is not described by value")


def environment(device: torch.device) -> str:
    """Return versions, settings and hardware that decide what an operation computes."""
    backends, cuda = torch.backends, torch.backends.cuda
    found: list[Any] = [sys.version, platform.machine(), np.__version__, torch.__version__]
    found += [torch.version.cuda, torch.version.hip, _triton_version(), source_digest(), _numbers()]
    found += [fedexp.__version__, torch.get_default_dtype(), torch.is_grad_enabled()]
    found += [torch.get_float32_matmul_precision(), torch.is_autocast_enabled(device.type)]
    found += [backends.cudnn.enabled, backends.cudnn.allow_tf32, backends.mkldnn.enabled]
    found += [cuda.matmul.allow_tf32, cuda.matmul.allow_fp16_reduced_precision_reduction]
    found += [cuda.matmul.allow_bf16_reduced_precision_reduction]
    found += [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    found += sorted(item for item in os.environ.items() if item[0].startswith(VARIABLES))
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        found += [card.name, card.major, card.minor, card.multi_processor_count, card.total_memory]
        found += [backends.cudnn.version(), DRIVER.read_text() if DRIVER.exists() else ""]
    else:
        found += [backends.cpu.get_cpu_capability()]
    return repr(found)


def _triton_version() -> str:
    """Return the version of Triton without importing it."""
    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


@cache
def source_digest() -> str:
    """Return a digest of all files of this package that a trial may call."""
    root, digest = Path(fedexp.__file__).parent, hashlib.sha256()
    files = [each for each in root.rglob("*") if each.suffix in (".py", ".json")]
    for file in sorted(files):
        name = file.relative_to(root)
        if name.parts[0].removesuffix(".py") not in NOT_TRIED:
            content = file.read_bytes()
            digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    if not files:
        raise UserCodeError("this package has no source files")
    return digest.hexdigest()


def _numbers() -> list[tuple[str, str]]:
    """Return the constants of this package, which a program may have changed.

    Not those of Triton's kernels, which are imported by the first trial or round that needs them.
    """
    plain = (bool, int, float, str)
    found = []
    for module in _tried_modules():
        if "triton" in vars(module):
            continue
        for name, value in vars(module).items():
            values = value.values() if isinstance(value, dict) else [value]
            if name.isupper() and all(isinstance(each, plain) for each in values):
                found.append((f"{module.__name__}.{name}", repr(value)))
    return sorted(found)


def _range(values: Tensor) -> tuple[Any, ...]:
    """Return the smallest and the largest value of a field, which all partitions share."""
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return ()
    try:
        return tuple(each.item() for each in values.aminmax())
    except NotImplementedError:
        raise UserCodeError(f"{values.dtype} has no smallest value") from None


def _magnitude(values: Tensor) -> int | str:
    """Return the power of two nearest to the root mean square, equal for most seeds."""
    norm = torch.linalg.vector_norm(values, dtype=torch.float64).item()
    size = norm / math.sqrt(max(1, values.numel()))
    return round(math.log2(size)) if math.isfinite(size) and size > 0 else str(size)


# Code of the user -------------------------------------------------------------------------------


def _check_model(work: Work) -> None:
    """Raise `UserCodeError` for streamed data, and for models with hooks or parametrizations."""
    if isinstance(work.task.train, StreamedFederation):
        raise UserCodeError("the data are streamed")
    objective = work.task.objective
    if not isinstance(objective, CopyableObjective):
        return
    for kind in {type(layer) for layer in objective.module.modules()}:
        _check_class(kind)
    for name, layer in objective.module.named_modules():
        if any(vars(layer).get(hooks) for hooks in HOOKS) or is_parametrized(layer):
            raise UserCodeError(f"{name or 'the model'} has hooks or parametrizations")
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(each._backward_hooks for each in tensors):
            raise UserCodeError(f"a tensor of {name or 'the model'} has hooks")


def _check_modes() -> None:
    if any(vars(module_base)[name] for name in GLOBAL_HOOKS):
        raise UserCodeError("there are hooks of all modules")
    if _get_current_function_mode_stack() or _get_current_dispatch_mode_stack():
        raise UserCodeError("a mode intercepts the operations of torch")


def _check_replaced() -> None:
    """Raise `UserCodeError` where a function of torch or of this package was replaced."""
    for space in (torch, functional, torch.Tensor, nn.Module):
        _check_functions(space)
    for module in _tried_modules():
        for name, value in vars(module).items():
            kind = value if isinstance(value, type) else type(value)
            if not _is_known(kind.__module__) or _is_foreign(value):
                raise UserCodeError(f"{module.__name__}.{name} was replaced")
            if isinstance(value, type) and value.__module__ == module.__name__:
                _check_functions(value)


def _tried_modules() -> Iterator[types.ModuleType]:
    """Return the loaded modules of this package that a trial may call."""
    for name, module in list(sys.modules.items()):
        parts = name.split(".")
        own = parts[0] == "fedexp" and len(parts) > 1 and parts[1] not in NOT_TRIED
        if own and isinstance(module, types.ModuleType):
            yield module


def _check_class(kind: type) -> None:
    """Raise `UserCodeError` for a class, or a method of it, that is not of torch or this package.

    Containers and numbers may be of Python or numpy.
    """
    found: Any = sys.modules.get(kind.__module__)
    if _root(kind.__module__) not in VERSIONED:
        if _is_known(kind.__module__):
            return
        raise UserCodeError(f"{kind.__qualname__} is defined in {kind.__module__}")
    for name in kind.__qualname__.split("."):
        found = None if found is None else vars(found).get(name)
    if found is not kind:
        raise UserCodeError(f"{kind.__qualname__} is not the class of {kind.__module__}")
    for base in kind.__mro__:
        if not _is_known(base.__module__):
            raise UserCodeError(f"{kind.__qualname__} inherits from {base.__module__}")
        if _root(base.__module__) in VERSIONED:
            _check_functions(base)


def _check_functions(owner: Any) -> None:
    for name, value in vars(owner).items():
        is_object = not isinstance(value, type)
        if (is_object and not _is_known(type(value).__module__)) or _is_foreign(value):
            raise UserCodeError(f"{owner.__name__}.{name} was replaced")


def _is_foreign(value: Any) -> bool:
    """Return whether a function or method is defined outside the known packages."""
    if isinstance(value, types.FunctionType):
        name = str(value.__globals__.get("__name__"))
        if not (_is_known(name) or name.startswith("namedtuple_")):
            return True
        return _is_foreign(vars(value).get("__wrapped__"))  # e.g. by torch.no_grad
    if isinstance(value, property):
        return any(map(_is_foreign, (value.fget, value.fset, value.fdel)))
    if isinstance(value, staticmethod | classmethod):
        return _is_foreign(value.__func__)
    if isinstance(value, partial):
        return _is_foreign(value.func)
    if isinstance(value, types.MethodType):
        return _is_foreign(value.__func__)
    return isinstance(value, _CACHED) and _is_foreign(value.__wrapped__)


def _is_known(module: str) -> bool:
    """Return whether a module is one of the known packages, not a user's file with such a name."""
    root = _root(module)
    if root not in sys.stdlib_module_names:
        return root in KNOWN
    file = getattr(sys.modules.get(root), "__file__", None)  # None if built in
    return root in KNOWN and (file is None or file.startswith(LIBRARY))


def _root(module: str) -> str:
    return module.partition(".")[0]


_CACHED = type(cache(_root))
