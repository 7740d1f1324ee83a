"""References to objects of the user's own: `study.py:task`, `package.module:name`.

A run of a user's task is stored, resumed and executed in worker processes like any other, so its
spec needs a text from which another process gets the task: a file or module, and a name in it.
Objects that no other process can import (made in a notebook or inside a function) have a reference
too, `session:name`, which is valid in this process alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from fedexp.errors import UsageError, first_line, require, unknown_name

SESSION = "session"
_session: WeakValueDictionary[str, Any] = WeakValueDictionary()
_importing: list[str] = []  # files and modules that are being imported, the innermost last


def is_reference(text: str) -> bool:
    """Return whether a text names an object in a file or module.

    >>> is_reference("study.py:task"), is_reference("digits")
    (True, False)
    """
    return ":" in text


def in_session(reference: str | None) -> bool:
    """Return whether a reference is valid in this process only."""
    return reference is not None and reference.partition(":")[0] == SESSION


def name_in(reference: str) -> str:
    """Return the name of the object in its file or module.

    >>> name_in("folder/study.py:make_task")
    'make_task'
    """
    return reference.rpartition(":")[2]


def load_object(reference: str) -> Any:
    """Return the object of a reference, importing its file or module if need be.

    A file is imported once per process, and its folder is searched for modules that it imports.
    """
    place, _, name = reference.rpartition(":")
    require(bool(place) and bool(name), f"{reference!r} names no object; write study.py:task")
    if place == SESSION:
        require(
            reference in _session,
            f"{name!r} was made in a Python session that has ended; continue it from Python "
            "(fedexp.run with the same task), or define it in a file and use study.py:NAME",
        )
        return _session[reference]
    module = _file_module(Path(place)) if place.endswith(".py") else _named_module(place)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            indented = rf"^[ \t]+(?:(?:def|class) +)?{re.escape(part)}\b *[=:(]"
            text = Path(place).read_text("utf-8", "replace") if place.endswith(".py") else ""
            if re.search(indented, text, re.MULTILINE):
                raise UsageError(
                    f"{place} does not define {part} when it is imported; move it out of the "
                    'function, or of if __name__ == "__main__":'
                )
            public = [n for n in vars(module) if not n.startswith("_")]
            raise unknown_name(f"name in {place}", name, public)
        value = getattr(value, part)
    return value


def reference_to(value: Any, name: str) -> str:
    """Return a reference to an object: of the module that defines it, else of this session.

    An object is importable if it is a global of a module that has a file.

    Args:
        value: the object.
        name: what to call it in the session.
    """
    for module in _modules():
        origin = _origin(module)
        if origin is None:
            continue
        for global_name, held in list(vars(module).items()):
            if held is value and not global_name.startswith("_"):
                return f"{origin}:{global_name}"
    for reference, held in _session.items():
        if held is value:
            return reference
    plain, count = name.replace(":", "-"), 1
    text = f"{SESSION}:{plain}"
    while text in _session:
        count += 1
        text = f"{SESSION}:{plain}-{count}"
    _session[text] = value
    return text


def function_reference(value: Any) -> str | None:
    """Return the reference of a function; None for any other."""
    if callable(value):
        return reference_to(value, getattr(value, "__name__", "function"))
    return value if isinstance(value, str) and is_reference(value) else None


def refuse_while_importing(call: str) -> None:
    """Raise `UsageError` for a run that is started by importing the file that defines its task."""
    if _importing:
        raise UsageError(
            f"{_importing[-1]} calls {call} while it is imported; put the call under "
            'if __name__ == "__main__":'
        )


def _modules() -> list[ModuleType]:
    """Return the modules of this process, the one that is running first."""
    modules = [sys.modules.get("__main__"), *sys.modules.values()]
    return [module for module in modules if module is not None]


def _origin(module: ModuleType) -> str | None:
    """Return the place of a user's module in a reference: its file, or its name if installed."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if module.__name__.partition(".")[0] in ("fedexp", "torch", "numpy"):
        return None
    path = Path(os.path.abspath(file))
    if not path.is_file():  # a cell of a notebook
        return None
    if "." in module.__name__ and module.__name__ != "__main__":
        return module.__name__
    here = Path.cwd()
    return str(path.relative_to(here)) if here in path.parents else str(path)


def _file_module(path: Path) -> ModuleType:
    """Return the module of a file: the one that is running, one imported before, or a new one."""
    full = Path(os.path.abspath(path))
    require(
        full.is_file(),
        f"there is no file {path}; give its path from this folder, or change to its folder",
    )
    for module in _modules():
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.abspath(file) == str(full):
            return module
    name = full.stem
    while name in sys.modules:
        name = f"{name}_"
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(full.parent) not in sys.path:  # as for a script, whose functions may import later
        sys.path.insert(0, str(full.parent))
    try:
        with _import_errors(str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _named_module(name: str) -> ModuleType:
    """Return a module by its name; the working directory is searched too."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _import_errors(name):
        return importlib.import_module(name)


@contextmanager
def _import_errors(place: str) -> Iterator[None]:
    """Report an exception while importing in one line, with the line of the user's file."""
    _importing.append(place)
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        frames, path = traceback.extract_tb(error.__traceback__), os.path.abspath(place)
        lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == path]
        where = f", line {lines[-1]}" if lines and lines[-1] else ""
        if isinstance(error, SyntaxError) and error.lineno:
            where = f", line {error.lineno}"
        raise UsageError(
            f"{place}{where} raised {type(error).__name__}: {first_line(error)}; fix it, or see "
            f"the traceback with: python {place}"
        ) from error
    finally:
        _importing.pop()
