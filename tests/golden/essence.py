"""What a result is reduced to, so that results of two versions of the package can be compared.

An essence is a tree of JSON. A column of rows is its value where that is the same in all rows, else
`[last value, digest of all values]`; weights are `[norm, digest of their bits]`, texts are stored
as they are. Seconds, folders and ids are left out. Digests begin with `sha:`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Tree = Any
FILE = Path(__file__).with_name("goldens.json")
LEFT_OUT = frozenset({"seconds", "folder", "id", "version"})
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
SAME = "same as "
CLOSE = 1e-4  # relative, where the arithmetic is another


def digest(data: bytes) -> str:
    return f"sha:{hashlib.sha256(data).hexdigest()[:8]}"


def columns(rows: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the columns of rows; a column that some rows lack is None there."""
    reduced: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row if name not in LEFT_OUT):
        values = [row.get(name) for row in rows]
        same = all(repr(value) == repr(values[0]) for value in values)
        reduced[name] = (
            values[0] if same else [values[-1], digest(json.dumps(values, default=str).encode())]
        )
    return reduced


def weights(tensors: Mapping[str, Tensor]) -> Tree:
    """Return the essence of tensors by name; their strides do not count."""
    arrays = {name: value.detach().cpu().contiguous().numpy() for name, value in tensors.items()}
    seen, squares = hashlib.sha256(), 0.0
    for name, array in sorted(arrays.items()):
        seen.update(f"{name} {array.dtype} {array.shape}".encode())
        seen.update(array.tobytes())
        squares += float(np.square(array.astype(np.float64)).sum())
    return [squares**0.5, f"sha:{seen.hexdigest()[:12]}"]


def timeless(tree: Tree) -> Tree:
    """Return a tree without seconds, folders and ids."""
    if isinstance(tree, Mapping):
        return {name: timeless(value) for name, value in tree.items() if name not in LEFT_OUT}
    return [timeless(value) for value in tree] if isinstance(tree, list) else tree


PROCESSOR = ("vendor_id", "cpu family", "model\t", "cache size")


def arithmetic() -> dict[str, str]:
    """Return what the bits of results depend on: versions, instruction set, and a sample of them.

    The sample is there because processors of one capability can have other kernels.
    """
    rng, sample = np.random.default_rng(0), hashlib.sha256()
    for kind in (torch.float32, torch.float64):
        x = torch.from_numpy(rng.normal(size=(53, 67))).to(kind)
        w = torch.from_numpy(rng.normal(size=(67, 29))).to(kind)
        image = x.reshape(1, 1, 53, 67)
        for value in (
            x @ w,
            (x @ w).softmax(dim=1),
            x.square().sum(),
            torch.linalg.vector_norm(x),
            torch.bmm(x[None].expand(3, -1, -1), w[None].expand(3, -1, -1)),
            torch.conv2d(image, w[:5, :5].reshape(1, 1, 5, 5)),
            x.tanh(),
        ):
            sample.update(value.contiguous().numpy().tobytes())
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    processor = [line.partition(":")[2].strip() for line in lines if line.startswith(PROCESSOR)]
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "processor": " ".join(processor),  # blocks of a matrix product follow its caches
        "capability": torch.backends.cpu.get_cpu_capability(),
        "sample": f"sha:{sample.hexdigest()[:12]}",
    }


def stored() -> dict[str, Tree]:
    """Return the stored essences by case, and the arithmetic that they were computed with."""
    lines: dict[str, Tree] = json.loads(FILE.read_text())
    return {name: _resolved(lines, tree) for name, tree in lines.items()}


def store(cases: Mapping[str, Tree]) -> None:
    """Write the file: one line per case, a case that equals an earlier one by its name."""
    lines: dict[str, Tree] = {"arithmetic": arithmetic()}
    first: dict[str, str] = {}
    for name, tree in cases.items():
        same = first.setdefault(json.dumps(tree, sort_keys=True), name)
        lines[name] = tree if same == name else f"{SAME}{same}"
    compact = partial(json.dumps, separators=(",", ":"))
    body = ",\n".join(f"{json.dumps(name)}: {compact(tree)}" for name, tree in lines.items())
    FILE.write_text(f"{{\n{body}\n}}\n")


def _resolved(lines: Mapping[str, Tree], tree: Tree) -> Tree:
    is_name = isinstance(tree, str) and tree.startswith(SAME)
    return lines[tree.removeprefix(SAME)] if is_name else tree


def differences(expected: Tree, result: Tree, exact: bool, where: str = "") -> list[str]:
    """Return one line per difference; what only the result has is new, and no difference.

    Where it is not `exact`, digests are skipped, and numbers (those within texts too) may differ by
    `CLOSE`, relatively, or by one unit of the last digit that a text shows.
    """
    if isinstance(expected, dict) and isinstance(result, dict):
        return [
            line
            for name, value in expected.items()
            for line in differences(value, result.get(name), exact, f"{where}/{name}")
        ]
    both_lists = isinstance(expected, list) and isinstance(result, list)
    if both_lists and len(expected) == len(result):
        return [
            line
            for at, (value, other) in enumerate(zip(expected, result, strict=True))
            for line in differences(value, other, exact, f"{where}/{at}")
        ]
    alike = expected == result and type(expected) is type(result)
    if alike or (not exact and _is_close(expected, result)):
        return []
    return [f"{where}: {expected!r} is now {result!r}"]


def _is_close(expected: Tree, result: Tree) -> bool:
    """Return whether two leaves agree where the arithmetic is another."""
    if not isinstance(expected, str) or not isinstance(result, str):
        numbers = all(type(value) in (int, float) for value in (expected, result))
        return numbers and abs(expected - result) <= CLOSE * abs(expected)
    if expected.startswith("sha:") and result.startswith("sha:"):
        return True
    if _skeleton(expected) != _skeleton(result):
        return False
    pairs = zip(NUMBER.findall(expected), NUMBER.findall(result), strict=True)
    return all(
        abs(float(old) - float(new)) <= max(CLOSE * abs(float(old)), 1.01 * _unit(old))
        for old, new in pairs
    )


def _skeleton(text: str) -> str:
    """Return a text without its numbers, and without the lines and blanks that fit their widths."""
    return re.sub(r"[\s-]+", " ", NUMBER.sub("#", text))


def _unit(number: str) -> float:
    """Return one unit of the last digit of a number, e.g. 0.01 for "3.14"."""
    digits, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
