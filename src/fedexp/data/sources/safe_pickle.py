"""Read untrusted pickles: arrays, lists, strings and numbers, nothing else.

A pickle is a program. This reader admits five names, those by which numpy stores an array, and
replaces each by a harmless placeholder, so that a pickle calls no function of numpy or of any other
module. The arrays of the dictionary are taken from the placeholders at the end.

The opcodes are checked before they run: a few bytes can request gigabytes of memory, or build a key
whose hash overflows the interpreter's stack.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedexp.data.sources.download import damage_named

MAX_BYTES = 2**30  # of a file; those of CIFAR have 31 to 155 MB
MAX_TUPLES = 10_000  # an array takes four; hashing nested ones has no limit on the depth
TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
NUMBERS = re.compile(r"[biuf][1248]")  # booleans, integers and floats


class _Type:
    """Placeholder for `numpy.dtype`."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.code = _text(code)
        if not NUMBERS.fullmatch(self.code):
            raise pickle.UnpicklingError(f"it holds an array of type {self.code!r}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = _text(state[1])
        self.code = (order if order in ("<", ">") else "") + self.code


class _Array:
    """Placeholder for `numpy.ndarray`."""

    value: NDArray[Any]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, by_column, raw = state
        if not isinstance(kind, _Type) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("it holds an array that is not of numbers")
        flat = np.frombuffer(raw, dtype=kind.code)
        self.value = flat.reshape(shape, order="F" if by_column else "C")


class _EmptyArray:
    """Placeholder for `_reconstruct`, which creates an empty array to be filled."""

    def __new__(cls, *_: Any) -> Any:
        return _Array()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a function")


class _Encoded:
    """Placeholder for `_codecs.encode`, by which Python 3 stores bytes in protocol 2.

    Each text is stored and encoded once, so together they are no longer than the file.
    """

    left: ClassVar[list[int]] = [0]  # characters that may still be encoded; one list per reader

    def __new__(cls, text: str, encoding: str = "latin1") -> Any:
        if not isinstance(text, str) or _text(encoding) != "latin1":
            raise pickle.UnpicklingError(f"it encodes text as {encoding!r}")
        cls.left[0] -= len(text)
        if cls.left[0] < 0:
            raise pickle.UnpicklingError("it encodes more text than it has")
        return text.encode("latin1")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of a function")


ADMITTED = {
    ("numpy.core.multiarray", "_reconstruct"): _EmptyArray,  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"): _EmptyArray,  # numpy 2
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _Encoded,
}


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")
        self._encoded = type("_Encoded", (_Encoded,), {"left": [len(data)]})

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        placeholder = ADMITTED[module, name]
        return self._encoded if placeholder is _Encoded else placeholder


def _check_program(data: bytes) -> None:
    """Refuse opcodes that no pickle of plain data has, and that cost more than their size."""
    tuples = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in PUTS and not 0 <= int(argument or 0) <= number:
            raise pickle.UnpicklingError("its memo index is too large")
        tuples += opcode.name in TUPLES
        if tuples > MAX_TUPLES:
            raise pickle.UnpicklingError(f"it has more than {MAX_TUPLES} tuples")


def read_pickle(path: Path) -> dict[str, Any]:
    """Read the dictionary in a pickle file, with keys converted to text.

    Only values of the dictionary become arrays; arrays inside lists remain placeholders. Text
    written by Python 2, as in the official CIFAR files, is returned as bytes.
    """
    with damage_named(f"{path}: refused or damaged pickle", "fetch it again"):
        if path.stat().st_size > MAX_BYTES:
            raise pickle.UnpicklingError(f"it has more than {MAX_BYTES} bytes")
        data = path.read_bytes()
        _check_program(data)
        content = _Reader(data).load()
        if not isinstance(content, dict):
            raise pickle.UnpicklingError(f"it is a {type(content).__name__}, not a dictionary")
        return {
            _text(name): value.value if isinstance(value, _Array) else value
            for name, value in content.items()
        }


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)
