"""Change the package one small step at a time, and count the changes that the tests detect.

    python -m tools.mutation --count 40
    python -m tools.mutation --seed 7 --only 'privacy/*.py' --tests tests/theory

A seed draws the mutants: swapped comparisons, + and -, `and` and `or`, a `not` left out, True and
False, other small numbers, `return None`, a removed `raise` or `require`. On each of them run the
file's doctests, the tests of the same folder, the contract of the server rules and those of
`--tests`, in a temporary copy of the checkout: the checkout itself is only read. A mutant that
survives is a behaviour that no test holds, or a change that makes no difference. Not on Windows.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILES = ("server/*.py", "aggregate.py", "client.py", "local.py", "privacy/*.py", "runs/*.py")
CONTRACT = ("tests/server/test_contract.py", "tests/server/test_golden.py")
SWAPS: dict[Any, Any] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.Is: ast.IsNot}
SWAPS |= {ast.In: ast.NotIn, ast.Add: ast.Sub, ast.And: ast.Or}
SWAPS |= {new: old for old, new in SWAPS.items()}


class Mutant(NamedTuple):
    """The bytes from `start` to `stop` of a file, and what stands there instead."""

    path: str
    start: int
    stop: int
    new: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed file."""
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        source = (ROOT / self.path).read_bytes()
        line, texts = source.count(b"\n", 0, self.start), (source, self.apply(source))
        old, new = (text.decode().splitlines()[line] for text in texts)
        return f"{self.path}:{line + 1}: {old.strip()} -> {new.strip()}"


def mutants(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    starts = [0, *(match.end() for match in re.finditer(b"\n", source))]
    for node in _nodes(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        if (new := _replacement(node)) is not None:
            yield Mutant(path, start, stop, new)


def _nodes(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield expressions and simple statements; no annotations, decorators and f-strings."""
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr | ast.stmt) and not hasattr(child, "body"):
                yield child
            kept = isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr)
            if kept and name not in ("annotation", "returns", "decorator_list"):
                yield from _nodes(child)


def _replacement(node: ast.AST) -> str | None:
    """Return what stands in the place of a node in a mutant, if there is one."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPS:
            node.ops = [SWAPS[type(operator)]()]
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            node.op = SWAPS[type(operator)]()
        case ast.UnaryOp(op=ast.Not()):
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value) | float(value)) if abs(value) <= 10:
            return repr(value - 1 if value == 1 else value + 1)
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            return "return None"
        case ast.Raise() | ast.Expr(value=ast.Call(func=ast.Name(id="require"))):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(node)})"


def sample(targets: Sequence[str], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants of files of the package, or all if there are fewer."""
    files = {file for name in targets for file in (ROOT / "src" / "fedexp").glob(name)}
    every = [m for f in sorted(files) for m in mutants(str(f.relative_to(ROOT)), f.read_bytes())]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def mirrors(path: str) -> list[str]:
    """Return the file, for its doctests, and the tests that mirror it, likeliest first."""
    folder, name = ROOT / "tests" / Path(*Path(path).parts[2:-1]), f"test_{Path(path).name}"
    files = [folder / name, *sorted(folder.glob("test_*.py") if folder.name != "tests" else ())]
    return [path, *(str(f.relative_to(ROOT)) for f in files if f.exists()), *CONTRACT]


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> str:
    """Return what becomes of a mutant: "killed", "survived" or "timeout"."""
    env = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with (folder / "output").open("w") as file:
        process = Popen(command, cwd=folder, env=env, stdout=file, stderr=file, process_group=0)
    try:
        return "killed" if process.wait(seconds) else "survived"
    except TimeoutExpired:
        return "timeout"
    finally:
        with suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wilson(successes: int, count: int, z: float = 1.96) -> str:
    """Return a proportion with its 95 % Wilson interval.

    >>> wilson(8, 10)
    '8 of 10, 80.0%, 95 % interval 49.0% to 94.3%'
    """
    centre, root = successes + z**2 / 2, successes * (count - successes) / count + z**2 / 4
    low, high = ((centre + end * z * root**0.5) / (count + z**2) for end in (-1, 1))
    return f"{successes} of {count}, {successes / count:.1%}, 95 % interval {low:.1%} to {high:.1%}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="mutants (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=FILES, help="patterns in the package")
    parser.add_argument("--tests", nargs="+", default=[], help="more tests for every mutant")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per mutant")
    args = parser.parse_args(argv)
    drawn, survivors = sample(args.only, args.seed, args.count), list[Mutant]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkout")
        ignore = shutil.ignore_patterns(".*", "results", "out", "site")
        shutil.copytree(ROOT, folder, ignore=ignore)
        for path in dict.fromkeys(mutant.path for mutant in drawn):
            tests, source = [*mirrors(path), *args.tests], (folder / path).read_bytes()
            if run_tests(folder, tests, args.timeout) != "survived":
                raise SystemExit(f"without a mutant: {(folder / 'output').read_text()}")
            outcomes = []
            for mutant in (mutant for mutant in drawn if mutant.path == path):
                (folder / path).write_bytes(mutant.apply(source))
                outcomes.append(run_tests(folder, tests, args.timeout))
                survivors += [mutant] * (outcomes[-1] == "survived")
            (folder / path).write_bytes(source)
            print(path, {name: outcomes.count(name) for name in ("killed", "survived", "timeout")})
    print(*map(str, survivors), sep="\n")
    print(f"seed {args.seed}: detected", wilson(len(drawn) - len(survivors), len(drawn)))


if __name__ == "__main__":
    main()
