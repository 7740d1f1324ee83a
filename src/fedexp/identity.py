"""One identity of Python values: what they consist of, their digests, and keys for sharing.

`parts` names what a value consists of: functions with closures, defaults and the globals that they
read, objects with attributes, modules, containers. Three things follow from it.

- `digest_of` is a text to store, by value alone: nothing depends on addresses, on comments, or on
  the position in a file. Code of torch, numpy and the standard library is identified by its name,
  functions of fedexp likewise, and classes of fedexp by their values, so that they may be renamed.
  All other code is the user's and is read as bytecode, with all that it refers to in its modules
  (for installed packages, in its own module only). An object of a library has the state that pickle
  would store. Left out is what use changes: generators, iterators, cached properties, and private
  attributes that methods assign.
- `key_of` is for one process: what cannot be compared by value, classes and code among it, is equal
  to itself alone.
- The search for hidden state (`fedexp.objective.hidden_state`) compares parts between calls.
"""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import io
import logging
import pickle
import random
import re
import sys
import sysconfig
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from torch import Tensor, nn

PYTHON = str(sys.implementation.cache_tag)  # whose bytecode is read
BYTES, BLOCK_BYTES = 16, 2**24  # of a digest; hashed at a time, on all cores
STANDARD = Path(sysconfig.get_paths()["stdlib"])
READ = ("user", "installed")  # whose code is read, see `origin`
NOTHING = (type(None), type(Ellipsis))
PLAIN = (bool, int, float, complex, str, bytes, *NOTHING, torch.dtype, torch.device)
OF_CONTAINERS = ("maxlen", "default_factory")
SEQUENCES = (list, tuple, deque, set, frozenset)
NAMESPACES = (ModuleType, SimpleNamespace, Namespace)
DESCRIPTORS = (staticmethod, classmethod, property, functools.cached_property)
HOLDING = (MethodType, functools.partial, type(functools.cache(len)), *DESCRIPTORS)
HELD = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
COMPARED = (*SEQUENCES, *HOLDING, Mapping, ReferenceType, nn.Module, FunctionType, type)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__setstate__")
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LOGGING = (logging.Logger, logging.LoggerAdapter, logging.Handler)  # may be named by the time
CHANGED_BY_USE = (Iterator, *GENERATORS, np.random.BitGenerator, *LOGGING)


@functools.cache
def origin(module: Any) -> str:
    """Return whose code a module is: "fedexp", "library", "installed" or "user".

    >>> [origin(name) for name in ("fedexp.models", "torch.nn", "functools", "pytest", "my_study")]
    ['fedexp', 'library', 'library', 'installed', 'user']
    """
    name = str(module)
    root = name.partition(".")[0]
    if root in ("fedexp", "torch", "numpy"):
        return "fedexp" if root == "fedexp" else "library"
    file = str(getattr(sys.modules.get(name, sys.modules.get(root)), "__file__", STANDARD / root))
    if re.search(r"[\\/](site|dist)-packages[\\/]", file):
        return "installed"
    is_standard = root in sys.stdlib_module_names and STANDARD in Path(file).parents
    return "library" if is_standard else "user"  # who may have a `random.py`


# What a value consists of -----------------------------------------------------------------------


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too, without cached properties."""
    state = object.__getstate__(value)
    named, slots = state if isinstance(state, tuple) else (state, None)
    pairs = sorted({**(named or {}), **(slots or {})}.items())
    cached = functools.cached_property
    return {n: v for n, v in pairs if not isinstance(getattr(type(value), n, None), cached)}


def parts(
    value: Any, installed: bool = False, used: bool = True
) -> Sequence[tuple[Any, Any]] | None:
    """Return what a value consists of, by name; None for an object whose structure is not known.

    Args:
        value: anything.
        installed: read functions and classes of installed packages too.
        used: with private attributes that use changes, and those of layers of libraries.
    """
    kind: Any = type(value)
    whose = origin((value if isinstance(value, FunctionType | type) else kind).__module__)
    is_read = whose == "user" or (installed and whose == "installed")
    if isinstance(value, FunctionType):
        return _parts_of_function(value, is_read)
    if isinstance(value, type):
        return _parts_of_class(value) if is_read else []
    if isinstance(value, ReferenceType):
        return [("", value())]
    if isinstance(value, HOLDING):
        return [(name, getattr(value, name)) for name in HELD if hasattr(value, name)]
    inside: list[Any] = [(n, getattr(value, n)) for n in OF_CONTAINERS if hasattr(value, n)]
    if isinstance(value, Mapping):
        inside += value.items()
    elif isinstance(value, SEQUENCES):
        is_set = isinstance(value, set | frozenset)
        inside += enumerate(sorted(value, key=digest_of) if is_set else value)
    elif isinstance(value, nn.Module):
        inside += [*value._parameters.items(), *value._buffers.items(), *value._modules.items()]
        hooks = [(name, list(getattr(value, name).values())) for name in HOOKS]
        inside += [(name, functions) for name, functions in hooks if functions]
    elif whose != "user" and not dataclasses.is_dataclass(value):
        return None
    named = attributes_of(value)
    if isinstance(value, nn.Module):
        named = {n: v for n, v in named.items() if n not in OF_EVERY_MODULE}
    if not used:
        fields = getattr(kind, "__dataclass_fields__", ())
        kept = named.keys() - _changed_by_use(kind) if whose in READ else fields
        named = {n: v for n, v in named.items() if n[:1] != "_" or n in kept}
    return [*inside, *named.items()]


def _parts_of_function(function: FunctionType, is_read: bool) -> list[tuple[str, Any]]:
    """Return the closure and the defaults of a function; attributes and globals if it is read."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    empty = CellType()
    inside = [(name, None if cell == empty else cell.cell_contents) for name, cell in cells]
    inside += [("defaults", function.__defaults__), ("defaults", function.__kwdefaults__)]
    if not is_read:
        return [*inside, ("__wrapped__", vars(function).get("__wrapped__"))]
    return [*inside, *_globals(function), *sorted(vars(function).items())]


def _globals(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names; of a module or namespace what it names there."""
    names, module = sorted(_names(function.__code__)), function.__module__
    namespaces, met = [("", function.__globals__)], set[int]()
    for path, namespace in namespaces:
        for name in filter(namespace.__contains__, names):
            value = namespace[name]
            if not isinstance(value, NAMESPACES):
                if origin(module) == "user" or getattr(value, "__module__", module) == module:
                    yield path + name, value
            elif origin(getattr(value, "__name__", None)) in READ and id(value) not in met:
                met.add(id(value))  # modules may import each other
                namespaces.append((f"{path}{name}.", vars(value)))


def _parts_of_class(kind: type) -> list[tuple[str, Any]]:
    """Return the bases of a class, its methods and its attributes without those of Python."""
    inside: list[tuple[str, Any]] = [("bases", kind.__bases__)]
    for name, value in sorted(vars(kind).items()):
        of_python = name.startswith("_abc_") or (name[:2] == "__" and name[-2:] == "__")
        if not of_python or isinstance(value, FunctionType):
            inside.append((name, value))
    return inside


@functools.cache
def _changed_by_use(kind: Any) -> set[str]:
    """Return the attributes that a module's forward pass assigns, or any method of other objects.

    A forward pass by itself and by the methods that it calls. Constructors do not count.
    """
    methods: defaultdict[str, list[FunctionType]] = defaultdict(list)
    for base in (base for base in kind.__mro__ if origin(base.__module__) in READ):
        for name, value in vars(base).items():
            method = inspect.unwrap(value) if callable(value) else value
            if isinstance(method, FunctionType) and name not in CONSTRUCTORS:
                methods[name].append(method)
    waiting = {"forward"} if issubclass(kind, nn.Module) else set(methods)
    changed = set[str]()
    while waiting:
        for method in methods.pop(waiting.pop(), ()):
            waiting |= _names(method.__code__)
            steps = dis.get_instructions(method)
            changed |= {step.argval for step in steps if step.opname == "STORE_ATTR"}
    return changed


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that a function and the functions inside it look up."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


class _Probe(pickle.Pickler):
    """A pickler to which functions and classes are plain values: they are read in another way."""

    def reducer_override(self, value: Any) -> Any:
        return (len, ("",)) if isinstance(value, FunctionType | type) else NotImplemented


def _pickled_state(value: Any) -> list[tuple[Any, Any]]:
    """Return what pickle stores of an object of a library, as values.

    Empty for what pickle cannot store, such as locks, open files and what holds them (a logger may
    have a folder named by the time), and for what changes with every use.
    """
    if isinstance(value, CHANGED_BY_USE):
        return []
    try:
        if isinstance(value, torch.distributions.Distribution):
            for name in value.arg_constraints:
                getattr(value, name)  # computed at first use, and an attribute from then on
        _Probe(io.BytesIO()).dump(value)
        reduce: Any = copyreg.dispatch_table.get(type(value))
        state = reduce(value) if reduce else value.__reduce_ex__(2)
    except Exception:
        return []
    state = (state,) if isinstance(state, str) else state
    return [("", list(part) if isinstance(part, Iterator) else part) for part in state]


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the memory of a tensor; copied only where it is not contiguous or on a GPU."""
    whole = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = whole.as_strided((whole.numel(),), (1,))  # one that was expanded may have stride 0
    # not by Tensor.numpy, which marks the memory as shared with numpy and no longer resizable
    array: np.ndarray[Any, Any] = np.from_dlpack(flat.view(torch.uint8))
    return array.data.cast("B")


# Digests and keys -------------------------------------------------------------------------------


def digest_of(*values: Any, whole: bool = False) -> str:
    """Return a digest of values and the code behind them.

    Where it depends on bytecode, the version of Python that compiled it follows.

    Args:
        values: anything.
        whole: read weights of torch modules, and private attributes that methods of objects assign.

    >>> digest_of(nn.LeakyReLU(0.1)) == digest_of(nn.LeakyReLU(0.1))
    True
    >>> digest_of(nn.LeakyReLU(0.1)) == digest_of(nn.LeakyReLU(0.2))
    False
    """
    reader = _Reader({}, whole=whole)
    digest = reader.digest(values)
    return f"{digest} {PYTHON}" if reader.compiled else digest


def key_of(value: Any, inputs: Sequence[Tensor] | None = None) -> Hashable:
    """Return a key that is equal for values that compute the same, and holds no mutable state.

    Numbers count with their types and signs; dataclasses, containers, modules, functions and
    partial functions by their contents. A tensor or any other object equals itself alone, and a
    tensor only until it is written to.

    Args:
        value: anything.
        inputs: tensors of a model that are inputs of its program, whose values do not count. Its
            other tensors count by their bytes. None for values that are no models.

    >>> key_of(0.0) == key_of(-0.0), key_of(1) == key_of(1.0), key_of([0.1]) == key_of([0.1])
    (False, False, True)
    """
    numbers = None if inputs is None else {id(tensor): k for k, tensor in enumerate(inputs)}
    reader = _Reader(numbers, exact=True)
    return reader.digest(value), *map(Identity, reader.identical)


class Identity:
    """A key that only the same object equals; it holds the object, so that no other has its id."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


class _Reader:
    """Feeds values to a hash, objects from a queue: they may refer to each other.

    Args:
        inputs: ids of tensors whose values do not count, with a number. None for all.
        whole: see `digest_of`.
        exact: for a key.

    Attributes:
        compiled: whether bytecode was read.
        identical: what equals itself alone, in a key.
    """

    def __init__(
        self, inputs: dict[int, int] | None, whole: bool = False, exact: bool = False
    ) -> None:
        self.compiled, self.identical = False, list[Any]()
        self._inputs, self._whole, self._exact = inputs, whole, exact
        self._hash = hashlib.blake2b(digest_size=BYTES)
        self._met: dict[int, tuple[int, Any]] = {}  # holds the values, so that ids stay unique
        self._unread: deque[Any] = deque()

    def digest(self, value: Any) -> str:
        """Read a value, then the objects that were met and those they refer to."""
        self._add(value)
        while self._unread:
            self._read(self._unread.popleft())
        return self._hash.hexdigest()

    def _put(self, *texts: str | memoryview) -> None:
        """Hash every text with its length, so that no two lists have the same bytes."""
        for text in texts:
            data = memoryview(text.encode()) if isinstance(text, str) else text
            if len(data) > BLOCK_BYTES:
                blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
                with ThreadPoolExecutor() as pool:  # hashing releases the GIL
                    hashes = pool.map(lambda block: hashlib.blake2b(block).digest(), blocks)
                    data = memoryview(b"".join(hashes))
            self._hash.update(len(data).to_bytes(8, "little"))
            self._hash.update(data)

    def _add(self, value: Any) -> None:
        """Read a plain value or a tuple; of an object only its number, until its turn comes."""
        if isinstance(value, PLAIN):
            self._put(type(value).__name__, repr(value))
        elif isinstance(value, CodeType) and not self._exact:
            self._code(value)
        elif isinstance(value, tuple):  # whether equal ones are one object is an accident
            self._put("tuple", str(len(value)))
            for part in (type(value), *value):
                self._add(part)
        else:
            if id(value) not in self._met:
                self._met[id(value)] = len(self._met), value
                self._unread.append(value)
            self._put("object", str(self._met[id(value)][0]))

    def _identity(self, value: Any) -> None:
        self._put("identity", str(len(self.identical)))
        self.identical.append(value)

    def _read(self, value: Any) -> None:
        """Read an object: its class, and its content, name or parts."""
        self._add(type(value))
        is_array = isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject
        if isinstance(value, Tensor) and value.layout == torch.strided:
            self._tensor(value)
        elif is_array and not isinstance(value, np.ma.MaskedArray):
            data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
            self._put(str(value.dtype), str(value.shape), data)
        elif isinstance(value, ModuleType):
            self._put(value.__name__)
        elif isinstance(value, COMPARED) or dataclasses.is_dataclass(value) or not self._exact:
            self._parts(value)
        else:
            self._identity(value)

    def _tensor(self, value: Tensor) -> None:
        self._put(str(value.dtype), str(tuple(value.shape)), str(value.requires_grad))
        if self._inputs is None:
            self._identity(value)
            self._put(str(0 if value.is_inference() else value._version))
        elif id(value) in self._inputs:
            self._put("input", str(self._inputs[id(value)]))
        else:
            self._put(tensor_bytes(value))

    def _parts(self, value: Any) -> None:
        is_module = isinstance(value, nn.Module)
        if isinstance(value, FunctionType | type):
            self._name(value)
        elif isinstance(value, nn.Module) and self._inputs is not None and not self._whole:
            weights = () if self._exact else (*value._parameters.values(), *value._buffers.values())
            self._inputs |= {id(tensor): 0 for tensor in weights}
        used = self._exact or (self._whole and not is_module)
        inside = parts(value, not self._exact, used)
        inside = _pickled_state(value) if inside is None else inside
        self._put(str(len(inside)))
        for pair in inside:
            self._add(pair)

    def _name(self, value: Any) -> None:
        """Read the name of a function or a class; the code of a user's function."""
        is_function, whose = isinstance(value, FunctionType), origin(value.__module__)
        if self._exact:
            self._identity(value.__code__ if is_function else value)
        elif is_function and whose in READ:
            self._code(value.__code__)
        elif whose == "fedexp":  # without names of classes
            self._put(re.sub(r"\b_*[A-Z]\w*\.", "", value.__qualname__) if is_function else whose)
        else:
            self._put(value.__module__ if whose == "library" else "", value.__qualname__)

    def _code(self, code: CodeType) -> None:
        """Read instructions with their names and constants, without lines and docstring."""
        self.compiled = True
        flags = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        self._add((code.co_argcount, code.co_kwonlyargcount, flags, code.co_exceptiontable))
        for step in dis.get_instructions(code):
            if step.opname != "EXTENDED_ARG":
                self._add((step.opname, step.argval))
