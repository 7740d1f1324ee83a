"""Print the path of a command through the package: the files it calls, and how deeply.

    python tools/trace_run.py                                  # fedexp run digits --rounds 3
    python tools/trace_run.py compare digits --seeds 2 --rounds 3 --jobs 2

The command runs in a process of its own under `sys.setprofile`, threads and worker processes
included; its runs go to a temporary folder. What is counted:

files     Files of the package with at least one Python function call: of a `def`, a lambda, a
          comprehension or a generator, not of the body of a module or a class.
depth     The largest number of package functions on the stack of one thread, plus one for the
          module `fedexp.__main__`. Frames of torch and of the standard library do not count.

Files are listed in the order of their first call, with their first functions; those called only
while modules are imported come last.
"""

from __future__ import annotations

import ast
import importlib
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
        self.called: dict[tuple[str, bool], set[str]] = {}
        self.depth = 0
        self.thread = threading.local()
        self.path = Path(output, f"{os.getpid()}.jsonl")

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(self.prefix):
            return
        mine, change = self.thread.__dict__, 1 if event == "call" else -1
        is_function = bool(code.co_flags & IS_FUNCTION)
        if is_function or code.co_filename == self.prefix + "__main__.py":
            mine["depth"] = mine.get("depth", 0) + change
            if mine["depth"] > self.depth:
                self.depth = mine["depth"]
                self.write("depth", self.depth)
        elif code.co_name == "<module>":
            mine["imports"] = mine.get("imports", 0) + change
        if is_function and event == "call":
            importing, name = mine.get("imports", 0) > 0, code.co_filename.removeprefix(self.prefix)
            functions = self.called.setdefault((name, importing), set())
            if len(functions) < 2 * SHOWN and code.co_name not in functions:
                functions.add(code.co_name)
                self.write("on_import" if importing else "files", [name, code.co_name])

    def write(self, kind: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([kind, value]) + "\n")


def trace(arguments: list[str]) -> list[str]:
    """Run `fedexp` with these arguments; return the counts, and one line per file."""
    package = Path(importlib.import_module("fedexp").__file__ or "").parent
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
    for kind, remark in (("files", ""), ("on_import", " (on import)")):
        before = set(files)
        for _, (name, function) in (event for event in events if event[0] == kind):
            if name not in before:
                files.setdefault(name, []).append(f"{function}{remark}")
    depth, longest = max(value for kind, value in events if kind == "depth"), max(map(len, files))
    lines = [
        f"{' '.join(['fedexp', *arguments])}: {len(files)} files, depth {depth}, "
        f"processes {len(written)}"
    ]
    for name, functions in files.items():
        docstring = ast.get_docstring(ast.parse((package / name).read_text())) or ""
        text = f"{name:<{longest}}  {docstring.partition(chr(10))[0]}"
        named = [function for function in functions if function[0] != "<"] or functions
        shown = "[" + ", ".join(dict.fromkeys(named[:SHOWN])) + "]"
        room = WIDTH - len(shown) - 2
        lines.append((text if len(text) <= room else text[: room - 3] + "...") + "  " + shown)
    return lines


if __name__ == "__main__":
    print("\n".join(trace(sys.argv[1:] or DEFAULT)))
elif PACKAGE in os.environ:  # imported as `sitecustomize` by a traced process
    _tracer = Tracer(os.environ[PACKAGE], os.environ[OUTPUT])
    threading.setprofile(_tracer)
    sys.setprofile(_tracer)
