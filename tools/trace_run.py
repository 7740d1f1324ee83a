"""Print the path of a command through the package: the files it calls, and how deeply.

    python tools/trace_run.py                                  # fedexp run digits --rounds 3
    python tools/trace_run.py --json
    python tools/trace_run.py --command compare digits --seeds 2 --rounds 3 --jobs 2

The command runs in a process of its own under `sys.setprofile`, threads and worker processes
included; its runs go to a temporary folder. What is counted:

files     Files of the package with at least one Python function call: of a `def`, a lambda, a
          comprehension or a generator, not of the body of a module or a class.
depth     The largest number of package functions on the stack of one thread, plus one for the
          module `fedexp.__main__`. Frames of torch and of the standard library do not count.
simulate  Calls of `simulate` in `fedexp.engine`; resuming the generator is not a call.
models    Torch modules that functions of `fedexp.models` return to callers elsewhere.

Files are listed in the order of their first call, with their first functions; those called only
while modules are imported come last. At commit ee4bf5d, with Python 3.11 on a CPU, the default
command has 68 files, depth 29, 2 calls of `simulate` and 4 models.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

DEFAULT = ["run", "digits", "--rounds", "3", "--quiet"]
PACKAGE, OUTPUT = "FEDEXP_TRACE_PACKAGE", "FEDEXP_TRACE_OUTPUT"  # set for traced processes
SHOWN = 3  # functions per file, lambdas and comprehensions left out
WIDTH = 110
IS_FUNCTION = 0x1  # CO_OPTIMIZED: set for functions, not for bodies of modules and classes


class Tracer:
    """The profile function of one process; writes a line of JSON whenever a count changes.

    A process may be killed at any time, so nothing is left to be written when it ends.

    Args:
        package: folder of the package, as code objects name it.
        output: folder for a file named after the process id.
    """

    def __init__(self, package: str, output: str) -> None:
        self.prefix = package + os.sep
        self.engine, self.models = self.prefix + "engine" + os.sep, self.prefix + "models"
        self.called: dict[tuple[str, bool], set[str]] = {}
        self.depth = 0
        self.thread = threading.local()
        self.path = Path(output, f"{os.getpid()}.jsonl")

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.prefix):
            return
        mine = self.thread.__dict__
        change = 1 if event == "call" else -1
        is_function = bool(code.co_flags & IS_FUNCTION)
        if is_function or code.co_filename == self.prefix + "__main__.py":
            mine["depth"] = mine.get("depth", 0) + change
            if mine["depth"] > self.depth:
                self.depth = mine["depth"]
                self.write("depth", self.depth)
        elif code.co_name == "<module>":
            mine["imports"] = mine.get("imports", 0) + change
        if is_function and event == "call":
            self.on_call(frame, importing=mine.get("imports", 0) > 0)
        elif is_function and code.co_filename.startswith(self.models) and _is_model(result):
            caller = frame.f_back
            if caller is None or not caller.f_code.co_filename.startswith(self.models):
                self.write("models", 1)

    def on_call(self, frame: FrameType, importing: bool) -> None:
        code = frame.f_code
        name = code.co_filename.removeprefix(self.prefix)
        functions = self.called.setdefault((name, importing), set())
        if len(functions) < 2 * SHOWN and code.co_name not in functions:
            functions.add(code.co_name)
            self.write("on_import" if importing else "files", [name, code.co_name])
        starts = (
            code.co_code[frame.f_lasti + 1] & 3 == 0
        )  # the argument of RESUME: not after a yield
        if starts and code.co_qualname == "simulate" and code.co_filename.startswith(self.engine):
            self.write("simulate", 1)

    def write(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")


def _is_model(value: Any) -> bool:
    return any(kind.__module__ == "torch.nn.modules.module" for kind in type(value).__mro__)


def trace(arguments: list[str]) -> dict[str, Any]:
    """Run `fedexp` with these arguments and return the counts of all its processes together."""
    package = _package()
    with tempfile.TemporaryDirectory() as folder:
        # Python imports `sitecustomize` when it starts, in worker processes as well.
        shutil.copy(__file__, Path(folder, "sitecustomize.py"))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        added = {
            "PYTHONPATH": os.pathsep.join(paths),
            "FEDEXP_RUNS": str(Path(folder, "runs")),
            PACKAGE: str(package),
            OUTPUT: folder,
        }
        command = [sys.executable, "-m", "fedexp", *arguments]
        process = subprocess.Popen(command, env={**os.environ, **added}, stdout=sys.stderr)
        if process.wait():
            sys.exit(f"trace_run: fedexp ended with status {process.returncode}")
        written = sorted(Path(folder).glob("*.jsonl"), key=lambda p: p.stem != str(process.pid))
        events = [json.loads(line) for path in written for line in path.open()]
    files: dict[str, list[str]] = {}
    for name, function in (value for kind, value in events if kind == "files"):
        files.setdefault(name, []).append(function)
    imported = [value for kind, value in events if kind == "on_import" and value[0] not in files]
    for name, function in imported:
        files.setdefault(name, []).append(f"{function} (on import)")
    return {
        "command": " ".join(["fedexp", *arguments]),
        "processes": len(written),
        "depth": max(value for kind, value in events if kind == "depth"),
        "simulate": sum(kind == "simulate" for kind, _ in events),
        "models": sum(kind == "models" for kind, _ in events),
        "files": files,
    }


def describe(traced: dict[str, Any]) -> list[str]:
    """Return the counts in one line, then one line per file: path, docstring, functions."""
    files = traced["files"]
    lines = [
        f"{traced['command']}: {len(files)} files, depth {traced['depth']}, "
        f"simulate {traced['simulate']}x, model built {traced['models']}x, "
        f"processes {traced['processes']}"
    ]
    longest = max(map(len, files))
    for name, functions in files.items():
        docstring = ast.get_docstring(ast.parse((_package() / name).read_text())) or ""
        text = f"{name:<{longest}}  {docstring.partition(chr(10))[0]}"
        named = [function for function in functions if function[0] != "<"] or functions
        shown = "[" + ", ".join(dict.fromkeys(named[:SHOWN])) + "]"
        room = WIDTH - len(shown) - 2
        lines.append((text if len(text) <= room else text[: room - 3] + "...") + "  " + shown)
    return lines


def _package() -> Path:
    spec = importlib.util.find_spec("fedexp")
    if spec is None or spec.origin is None:
        sys.exit("trace_run: fedexp is not importable: install it, or set PYTHONPATH to src")
    return Path(spec.origin).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument(
        "--command",
        nargs=argparse.REMAINDER,
        default=DEFAULT,
        help=f"arguments of fedexp, the last option (default: {' '.join(DEFAULT)})",
    )
    options = parser.parse_args()
    traced = trace(options.command)
    print(json.dumps(traced, indent=1) if options.json else "\n".join(describe(traced)))


if __name__ == "__main__":
    main()
elif PACKAGE in os.environ:  # imported as `sitecustomize` by a traced process
    _tracer = Tracer(os.environ[PACKAGE], os.environ[OUTPUT])
    threading.setprofile(_tracer)
    sys.setprofile(_tracer)
