"""Mutations of valid bytes and trees, and a guard on what a reader does with them."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedexp.errors import UsageError
from fedexp.runs import RunWarning

# FEDEXP_FUZZ=20000 runs the same tests as a campaign: that many new examples per test.
CAMPAIGN = int(os.environ.get("FEDEXP_FUZZ", "0"))
MEGABYTE = 2**20
MEMORY = 64 * MEGABYTE  # bytes; more than any of these small files needs
PROCESS_EVENTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")
FILE_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def fuzz(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with that many random generators, the same in every run except in a campaign.

    A failure names its generator, which reproduces it.
    """
    profile = settings(
        max_examples=CAMPAIGN or number,
        derandomize=not CAMPAIGN,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: profile(given(draw=st.randoms(use_true_random=True))(test))


# Audit events of the interpreter. A hook cannot be removed, so it is switched on and off.
_seen: list[str] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in PROCESS_EVENTS or event in FILE_EVENTS:
        _seen.append(f"{event} {args[:1]}")
    elif event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        _seen.append(f"writes {args[0]}")


sys.addaudithook(_audit)


@contextmanager
def watched(memory: int = MEMORY, writes: bool = False) -> Iterator[None]:
    """Fail if the block starts a process, writes a file or allocates more than `memory` bytes."""
    global _seen
    tracemalloc.start()
    _seen = []
    try:
        yield
    finally:
        seen, _seen = _seen, None
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    seen = [line for line in seen if not (writes and line.startswith(("writes", *FILE_EVENTS)))]
    assert not seen, seen
    assert peak < memory, f"{peak / MEGABYTE:.0f} MB for a small file"


def harmless(action: Callable[[], Any], memory: int = MEMORY, writes: bool = False) -> Any:
    """Return the result of an action, or its one-line `UsageError`; fail on anything else."""
    with watched(memory, writes), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RunWarning)
        try:
            return action()
        except UsageError as error:
            text = str(error)
    assert text.isprintable(), f"not one line: {text!r}"
    assert text.strip(), "an empty error message"
    return text


class Files(dict[str, bytes]):
    """File contents by name; a failure report shows the names only."""

    def __repr__(self) -> str:
        return f"Files({', '.join(self)})"


def contents(folder: Path) -> Files:
    """Return all files in a folder tree."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return Files({str(path.relative_to(folder)): path.read_bytes() for path in files})


# Mutations of bytes: by a bad disk, and by an attacker who knows the format.
NUMBERS = [0, 1, 7, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1]
TEXTS = [b"9" * 30, b"-", b"\n", b"\0", b"[" * 9, b'"', b"1e999", b"[" * 5000]
MUTATIONS = ["flip", "flip", "cut", "drop", "repeat", "splice", "number", "number", "text"]
NUMBER_FORMATS = ["<I", ">I", "<Q", ">Q", "<H", ">H", "<B"]


def mutated(draw: Random, *seeds: bytes) -> bytes:
    """Return one of some valid files, mutated; sometimes random bytes."""
    if draw.random() < 0.05:
        return draw.randbytes(draw.randrange(300))
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.randint(1, 4)):
        _mutate(draw, data, seeds)
    return bytes(data)


def _mutate(draw: Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = draw.randrange(len(data) + 1)
    match draw.choice(MUTATIONS):
        case "flip":
            if at < len(data):
                data[at] ^= 1 << draw.randrange(8)
        case "cut":
            del data[at:]
        case "drop":
            del data[at : at + draw.randint(1, 64)]
        case "repeat":
            data[at:at] = data[at : at + draw.randint(1, 64)] * draw.randint(1, 3)
        case "splice":
            other = draw.choice(seeds)
            data[at:] = other[draw.randrange(len(other) + 1) :]
        case "number":
            form = draw.choice(NUMBER_FORMATS)
            piece = struct.pack(form, draw.choice(NUMBERS) % 2 ** (8 * struct.calcsize(form)))
            data[at : at + len(piece)] = piece
        case "text":
            data[at:at] = draw.choice(TEXTS)


DEEP: Any = json.loads("[" * 200 + "]" * 200)
VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.5, 1e308),
    *(float("inf"), float("nan"), "", "1", "a\nb", "\x1b[2J", "../up", "/dev/zero", "x" * 5000),
    *([], {}, [1], [[]], ["a"], {"a": 1}, DEEP),
]


def forged(draw: Random, tree: Any) -> Any:
    """Return a JSON or TOML tree with a few nodes replaced, removed or added."""
    root = {"": copy.deepcopy(tree)}
    for _ in range(draw.randint(1, 3)):
        parent, key = draw.choice(_nodes(root))
        kind = draw.choice(["replace", "replace", "remove", "add"])
        if kind == "remove" and parent is not root:
            del parent[key]
        elif kind == "add" and isinstance(parent[key], dict):
            parent[key][draw.choice(["x", "", "a\nb", "file", "round"])] = draw.choice(VALUES)
        else:
            parent[key] = copy.deepcopy(draw.choice(VALUES))
    return root[""]


def _nodes(tree: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return every node, as its parent and its key there."""
    found: list[tuple[Any, Any]] = []
    todo: list[Any] = [tree]
    while todo and len(found) < 500:
        node = todo.pop()
        for key in node.keys() if isinstance(node, dict) else range(len(node)):
            found.append((node, key))
            if isinstance(node[key], dict | list):
                todo.append(node[key])
    return found
