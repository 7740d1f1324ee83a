"""Digests of Python values, and of the code behind them.

Code of fedexp, torch, numpy and the standard library is identified by its name; all other code is
the user's and is read, with the functions, classes and constants of its modules that it refers to
(for installed packages, of its own module only). A user's object is digested with its attributes, a
torch module with its layers and their settings, an object of a library with what pickle would store
of it. Of losses, metrics, rules and functions among the options tensors of modules (weights of
classes) count as well. Left out is what use changes: random generators, iterators, cached
properties, and private attributes that the forward pass of a module assigns. Nothing depends on
addresses, on comments, or on the position in a file.

There are two views of a function. Its bytecode is what runs, but another version of Python compiles
it differently. Its source is the same for all versions, but the file may have been edited since it
was imported. So a digest has both, and two digests are compared by bytecode where both have that of
the same Python, and otherwise by source.
"""

from __future__ import annotations

import ast
import copyreg
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import io
import logging
import pickle
import random
import sys
import sysconfig
import textwrap
import tokenize
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Digest = dict[str, str]
SOURCE, BYTECODE = "source", str(sys.implementation.cache_tag)
LIBRARIES = ("fedexp", "torch", "numpy")
BYTES = 16  # of a digest
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
NAMESPACES = (Namespace, types.SimpleNamespace)
CHANGED_BY_USE = (
    Iterator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
    torch.Generator,
    logging.Logger,  # named by the module, which is __main__ in a script
    logging.LoggerAdapter,
    logging.Handler,
)
CONSTRUCTORS = ("__init__", "__new__", "__post_init__", "__setstate__")
MODULE = {*dir(nn.Module), *vars(nn.Module())}  # what every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Whether a function takes *args and **kwargs, and is a generator or a coroutine; other flags depend
# on the compilation.
CALLED = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)
BY_NAME = {*dis.hasname, *dis.haslocal, *dis.hasfree, *dis.hascompare, *dis.hasjrel, *dis.hasjabs}


def digest_of(*values: Any, whole: bool = False) -> Digest:
    """Digest values and the code behind them, by source and by bytecode.

    Args:
        values: anything.
        whole: read tensors of torch modules as well.

    >>> same(digest_of(nn.LeakyReLU(0.1)), digest_of(nn.LeakyReLU(0.1)))
    True
    >>> same(digest_of(nn.LeakyReLU(0.1)), digest_of(nn.LeakyReLU(0.2)))
    False
    """
    return {view: _Reader(view, whole).digest(*values) for view in (SOURCE, BYTECODE)}


def same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Compare two digests by bytecode where both have that of one Python, or else by source."""
    shared = one.keys() & other.keys()
    views = shared - {SOURCE} or shared
    return bool(views) and all(one[view] == other[view] for view in views)


def tensor_bytes(value: Tensor) -> memoryview:
    """Return the memory of a tensor; copied only where it is not contiguous or on a GPU."""
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    # not by Tensor.numpy, which marks the memory as shared with numpy, see `_version`
    array: NDArray[Any] = np.from_dlpack(flat.view(torch.uint8))
    return array.data.cast("B")


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module's code is identified by name; a user's `random.py` is not.

    >>> is_library("torch.nn.functional"), is_library("functools"), is_library("my_study")
    (True, True, False)
    """
    root = (module or "").partition(".")[0]
    if root in LIBRARIES:
        return True
    if root not in sys.stdlib_module_names:
        return False
    spec = getattr(sys.modules.get(root), "__spec__", None)
    origin = spec.origin if spec is not None else None
    if origin in (None, "built-in", "frozen"):
        return True
    return Path(sysconfig.get_paths()["stdlib"]) in Path(str(origin)).parents


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module is of an installed package, and not of the user's own files."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    paths = sysconfig.get_paths()
    places = [Path(paths[name]) for name in ("purelib", "platlib")]
    return file is not None and any(place in Path(file).parents for place in places)


class _Reader:
    """Feeds values to a hash.

    Functions and classes are read from a queue, after all values: a graph of calls can be deeper
    than Python's stack.
    """

    def __init__(self, view: str, whole: bool) -> None:
        self.view, self.whole = view, whole
        self.hash = hashlib.blake2b(digest_size=BYTES)
        self._seen: dict[int, tuple[int, Any]] = {}  # holds the values, so that ids stay unique
        self._unread: deque[types.FunctionType | type] = deque()

    def digest(self, *values: Any) -> str:
        """Read values, then the functions and classes that were met and those they refer to."""
        for value in values:
            self.add(value)
        while self._unread:
            value = self._unread.popleft()
            self._put("definition", str(self._seen[id(value)][0]))
            if isinstance(value, type):
                self._class(value)
            else:
                self._function(value)
        return self.hash.hexdigest()

    def add(self, value: Any) -> None:
        """Read a value; of one that was read before, only its number."""
        if isinstance(value, enum.Enum):
            self._put("enum", type(value).__qualname__, value.name)
        elif isinstance(value, PLAIN):
            self._put(type(value).__name__, repr(value))
        elif isinstance(value, torch.dtype | torch.device | np.dtype):
            self._put("kind", str(value))
        elif isinstance(value, np.generic):
            self._put("number", str(value.dtype), value.tobytes())
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif isinstance(value, tuple):  # whether equal ones are one object is an accident
            self._each("tuple", value)
        elif isinstance(value, set | frozenset):
            alone = (_Reader(self.view, self.whole).digest(each) for each in value)
            self._put("set", *sorted(alone))
        else:
            known = id(value) in self._seen
            at, _ = self._seen.setdefault(id(value), (len(self._seen), value))
            self._put("object", str(at))
            if not known:
                self._object(value)

    def _put(self, *texts: str | bytes | memoryview) -> None:
        """Hash every text with its length, so that no two lists have the same bytes."""
        for text in texts:
            data = text.encode() if isinstance(text, str) else text
            self.hash.update(len(data).to_bytes(8, "little"))
            self.hash.update(data)

    def _each(self, what: str, values: Iterable[Any]) -> None:
        found = list(values)
        self._put(what, str(len(found)))
        for value in found:
            self.add(value)

    def _pairs(self, what: str, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._each(what, [each for pair in pairs for each in pair])

    def _object(self, value: Any) -> None:
        match value:
            case types.FunctionType() | type():
                self._unread.append(value)
            case list():
                self._each("list", value)
            case dict():
                self._pairs("mapping", value.items())
            case Tensor():
                self._put("tensor", str(value.dtype), str(tuple(value.shape)), tensor_bytes(value))
            case np.ndarray() if value.dtype.hasobject:
                self._each("array", value.ravel().tolist())
            case np.ndarray():
                data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
                self._put("array", str(value.dtype), str(value.shape), data)
            case functools.partial():
                self._each("partial", [value.func, value.args, value.keywords])
            case types.MethodType():
                self._each("method", [value.__func__, value.__self__])
            case staticmethod() | classmethod():
                self._each(type(value).__name__, [value.__func__])
            case property():
                self._each("property", [value.fget, value.fset, value.fdel])
            case functools.cached_property():
                self._each("property", [value.func])
            case types.ModuleType():
                self._put("module", value.__name__)
            case nn.Module():
                self._layers(value)
            case _ if type(value) in BUILTIN:
                self._put("builtin", value.__qualname__)
            case _:
                self._instance(value)

    def _function(self, function: types.FunctionType) -> None:
        text = _source(function) if self.view == SOURCE else None
        if is_library(function.__module__):
            self._put("function", f"{function.__module__}.{function.__qualname__}")
        elif text is not None:
            self._put("source", text)
        else:
            self._code(function.__code__)
        names = function.__code__.co_freevars
        cells = [_held(cell) for cell in function.__closure__ or ()]
        self._pairs("closure", zip(names, cells, strict=True))
        self.add(vars(function).get("__wrapped__"))
        if not is_library(function.__module__):
            self.add(function.__defaults__)
            self._pairs("defaults", sorted((function.__kwdefaults__ or {}).items()))
            self._pairs("globals", _globals(function))

    def _code(self, code: types.CodeType) -> None:
        """Read instructions with their names and constants, without lines and docstring."""
        kinds = (code.co_argcount, code.co_kwonlyargcount, code.co_flags & CALLED)
        self._put("code", *map(str, kinds))
        for step in dis.get_instructions(code):
            if step.opname == "EXTENDED_ARG":
                continue
            self._put(step.opname)
            if step.opcode in dis.hasconst:
                self.add(step.argval)
            else:
                self._put(str(step.argval if step.opcode in BY_NAME else step.arg))
        self._put(code.co_exceptiontable)

    def _class(self, kind: type) -> None:
        self._put("class", kind.__qualname__)
        own = not is_library(kind.__module__)
        if not own:
            self._put(kind.__module__)
        self._each("bases", [each for each in kind.__mro__[1:] if not is_library(each.__module__)])
        of_class = vars(kind)
        for name, value in sorted(of_class.items()) if own else []:
            dunder = name.startswith("__") and name.endswith("__")
            if not name.startswith("_abc_") and (
                not dunder or isinstance(value, types.FunctionType)
            ):
                self._put("attribute", name)
                self.add(value)

    def _layers(self, module: nn.Module) -> None:
        """Read a tree of layers: classes, settings and hooks; weights only if `whole`."""
        for name, each in module.named_modules():
            self._put("layer", name)
            self.add(type(each))
            own = [(n, v) for n, v in vars(each).items() if self._is_setting(n, type(each))]
            self._pairs("settings", sorted(own, key=lambda pair: pair[0]))
            for kind in HOOKS:
                self._each(kind, vars(each).get(kind, {}).values())
        if self.whole and (tensors := [*module.parameters(), *module.buffers()]):
            self._each("tensors", tensors)

    def _is_setting(self, name: str, kind: Any) -> bool:
        """Return whether an attribute of a module is read: not what every module has itself."""
        if name[:1] != "_":
            return name != "training"
        own = not is_library(kind.__module__)
        return own and name not in MODULE and name not in _not_settings(kind)

    def _instance(self, value: Any) -> None:
        kind: Any = type(value)
        own = attributes_of(value)
        self.add(kind)
        library, fields = is_library(kind.__module__), dataclasses.is_dataclass(value)
        if fields:
            names = [field.name for field in dataclasses.fields(value)]
            self._pairs("fields", [(name, getattr(value, name, None)) for name in names])
            own = {name: each for name, each in own.items() if name not in names}
        if isinstance(value, NAMESPACES) or not library:
            private = not _is_installed(kind.__module__)
            changing = () if self.whole else _assigned_in_use(kind)
            read = [
                (name, each)
                for name, each in own.items()
                if name[:1] != "_" or (private and name not in changing)
            ]
            self._pairs("attributes", sorted(read, key=lambda pair: pair[0]))
        self.add(own.get("__wrapped__"))  # a cache around a function, for one
        if not fields and (library or _is_installed(kind.__module__)):
            self._each("state", _pickled_state(value))


class _Probe(pickle.Pickler):
    """A pickler to which functions and classes are plain values: they are read in another way."""

    def reducer_override(self, value: Any) -> Any:
        return (len, ("",)) if isinstance(value, types.FunctionType | type) else NotImplemented


def _pickled_state(value: Any) -> list[Any]:
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
        own = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(2) if own is None else own(value)
    except Exception:
        return []
    parts = [reduced] if isinstance(reduced, str) else reduced
    listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
    return [
        sorted(p.items(), key=lambda pair: repr(pair[0])) if isinstance(p, dict) else p
        for p in listed
    ]


@functools.cache
def _not_settings(kind: type[nn.Module]) -> frozenset[str]:
    """Return the attributes of a module that its forward pass assigns, or a layer of torch's own.

    A forward pass by itself and by the methods that it calls. A layer of torch has its settings in
    public attributes, and its weights in private ones too.
    """
    bases = [b for b in kind.__mro__ if b not in (nn.Module, object) and is_library(b.__module__)]
    methods = [each for base in bases for each in vars(base).values()]
    names, at = ["forward"], 0
    while at < len(names):
        method = inspect.unwrap(getattr(kind, names[at], len))
        at += 1
        if isinstance(method, types.FunctionType) and not is_library(method.__module__):
            methods.append(method)
            names += sorted(_names(method.__code__).difference(names))
    return _assigned_by(methods)


@functools.cache
def _assigned_in_use(kind: Any) -> frozenset[str]:
    """Return the attributes that methods of a user's class assign, apart from its constructor."""
    bases = [base for base in kind.__mro__ if not is_library(base.__module__)]
    own = (vars(base).items() for base in bases)
    return _assigned_by(each for pairs in own for n, each in pairs if n not in CONSTRUCTORS)


def _assigned_by(methods: Iterable[Any]) -> frozenset[str]:
    """Return the names of the attributes that functions assign; other values are left out."""
    functions = [each for each in methods if isinstance(each, types.FunctionType)]
    steps = (step for each in functions for step in dis.get_instructions(each))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, those in slots too, without cached properties."""
    kind = type(value)
    own = {name: getattr(value, name, None) for name in _slots(kind)} | getattr(
        value, "__dict__", {}
    )
    cached = functools.cached_property
    return {n: each for n, each in own.items() if not isinstance(getattr(kind, n, None), cached)}


def _slots(kind: type) -> list[str]:
    """Return the attributes of a class that are in slots."""
    named = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    slots = [name for each in named for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in slots if name not in ("__dict__", "__weakref__")]


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function names; of a module or namespace what it names there."""
    names, own_module = sorted(_names(function.__code__)), function.__module__
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType) and is_library(value.__name__):
            continue  # its name is in the code
        if _is_installed(own_module) and getattr(value, "__module__", own_module) != own_module:
            continue
        if isinstance(value, (types.ModuleType, *NAMESPACES)):
            yield from _members(name, value, names)
        else:
            yield name, value


def _members(path: str, module: Any, names: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in ((name, vars(module)[name]) for name in names if name in vars(module)):
        own = isinstance(value, types.ModuleType) and not (
            is_library(value.__name__) or _is_installed(value.__name__)
        )
        if own and name not in path.split("."):  # modules may import each other
            yield from _members(f"{path}.{name}", value, names)
        else:
            yield f"{path}.{name}", value


def _names(code: types.CodeType) -> set[str]:
    """Return the names that a function and the functions inside it look up."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)


def _held(cell: types.CellType) -> Any:
    """Return the content of a closure's cell; None where it was never filled."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _source(function: types.FunctionType) -> str | None:
    """Return a function's source without comments, layout and docstrings; None without source.

    A lambda inside a call, which is no statement, is taken as it is written. What an installed
    package has is read once: a class such as pandas.Series has thousands of functions.
    """
    installed = _is_installed(function.__module__)
    return _source_of_installed(function) if installed else _source_of(function)


@functools.cache
def _source_of_installed(function: types.FunctionType) -> str | None:
    return _source_of(function)


def _source_of(function: types.FunctionType) -> str | None:
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):  # the file may have changed
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text.strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body[0] = ast.Pass()
    return ast.unparse(tree)
