"""The commands of a page: executed where that takes seconds here, else parsed by their own parser.

- `fedexp` on tasks that train in a moment runs in this process, for one or two rounds, over at most
  two seeds, on the CPU. On other tasks its options are resolved: the task is built on generated
  data, and every algorithm, option and value is checked. Studies of the paper are resolved to the
  specs of their runs.
- Scripts of the repository, `torchrun` and Flower's programs parse their arguments.
- `make` targets, extras of `pip install`, folders and addresses must exist.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from packaging.requirements import InvalidRequirement, Requirement

from fedexp.cli.main import main
from fedexp.cli.options import experiment_of, listed, settings_of
from fedexp.data.datasets import find
from fedexp.experiment import experiments
from fedexp.reproduce import STUDIES
from fedexp.reproduce.study import Plan, Request, choose_tasks, jobs_of, rounds_of
from fedexp_command.parsers import COMMANDS, build_parser

ROOT = Path(__file__).parents[2]
PROJECT = "fedexp"  # the package, and the folder of a fresh clone
QUICK_TASKS = ("toy", "synthetic", "digits", "digits-mlp", "mnist")  # and the user's own
QUICK_STUDIES = ("toy", "synthetic")
LIMITS = {  # appended to a command that is executed, for the options that it has
    "run": ("--rounds", "1"),
    "compare": ("--rounds", "1", "--jobs", "1"),
    "tune": ("--rounds", "1", "--jobs", "1"),
    "reproduce": ("--rounds", "2", "--jobs", "1"),
}
SLURM = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "8"}


class Shell:
    """Executes the commands of one page in its scratch folder, which is the working directory.

    Args:
        folder: the scratch folder.
        page: path of the page, whose folder a command may be meant for.
    """

    def __init__(self, folder: Path, page: Path) -> None:
        self.folder, self._places = folder, [folder, page.parent, ROOT]

    def execute(self, words: Sequence[str]) -> None:
        """Execute or parse one command; raises an error if it is wrong."""
        program = Path(words[0]).name
        programs: dict[str, Callable[[list[str]], None]] = {
            "fedexp": self._fedexp,
            "python": self._python,
            "python3": self._python,
            "pip": _check_pip,
            "make": _check_make,
            "torchrun": self._torchrun,
            "srun": self.execute,
            "export": _check_export,
            "cd": self._change_folder,
            "git": _check_git,
            "flwr": _parse_flwr,
            "flower-superlink": lambda own: _parse_entry_point(program, own),
            "flower-supernode": lambda own: _parse_entry_point(program, own),
        }
        assert program in programs, f"{program}: not known here; put <!-- no-run: reason --> above"
        with patch.dict(os.environ, SLURM):
            programs[program]([os.path.expandvars(word) for word in words[1:]])

    def _fedexp(self, words: list[str]) -> None:
        words = [self._path(word) for word in words]
        try:
            args = build_parser().parse_args(words)
        except SystemExit:  # --help, --version; mistakes are a Misuse
            return
        command = words[0]
        if command in ("run", "compare", "tune") and not _is_quick(args.task):
            _resolve(tuple(words))
        elif command == "reproduce" and not (
            args.list or args.source or args.what in QUICK_STUDIES
        ):
            _resolve_study(args)
        elif words[:2] == ["data", "fetch"]:
            find(args.name)
        else:
            if command == "reproduce" and args.source is not None:
                self._copy_results(args.source)
            given = [*words, *_limits(command, args)]
            assert main(given) == 0, f"fedexp {' '.join(given)}"

    def _path(self, word: str) -> str:
        """Complete `...` in a path; move absolute paths into the scratch folder."""
        if word.startswith("/"):
            return str(self.folder / word[1:])
        if "..." not in word:
            return word
        paths = sorted(self.folder.glob(word.replace("...", "*")), key=os.path.getmtime)
        assert paths, f"{word}: no command above has made such a path"
        return str(paths[-1].relative_to(self.folder))

    def _copy_results(self, source: Path) -> None:
        """Copy the stored runs of the repository, which commands may add to."""
        if not source.exists() and (ROOT / source / "runs").is_dir():
            shutil.copytree(ROOT / source / "runs", self.folder / source / "runs")

    def _python(self, words: list[str]) -> None:
        if words[0] == "-m":
            self._module(words[1], words[2:])
        elif words[0] == "-c":
            compile(words[1], "-c", "exec")
        else:
            script = self.find(words[0])
            if script.parent == self.folder:
                runpy.run_path(words[0], run_name="__main__")
            else:
                _parse_script(script, words[1:])

    def _module(self, name: str, words: list[str]) -> None:
        if name == "fedexp":
            self._fedexp(words)
        elif name == "pip":
            _check_pip(words)
        elif name not in ("venv", "build", "pytest"):
            spec = find_spec(name)
            assert spec is not None, f"python -m {name}: no such module"
            package = spec.submodule_search_locations
            _parse_script(
                Path(package[0], "__main__.py") if package else Path(str(spec.origin)), words
            )

    def find(self, path: str) -> Path:
        """Return a file of the scratch folder, of the page's folder or of the repository."""
        for place in self._places:
            if (place / path).exists():
                return place / path
        raise AssertionError(f"{path}: neither in the page's folder nor in the repository")

    def _torchrun(self, words: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        try:
            args = get_args_parser().parse_args(words)
        except SystemExit as done:
            raise AssertionError(f"torchrun {' '.join(words)}: refused") from done
        self._python(
            [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        )

    def _change_folder(self, words: list[str]) -> None:
        (name,) = words
        if name != PROJECT:
            self._places.insert(1, self.find(name))


def check_inline(text: str, shell: Shell) -> None:
    """Check a command in a sentence: its program and options exist; values are not checked."""
    words = shlex.split(text.replace("...", ""))
    if words[0] == "torchrun" and "-m" in words:
        words = words[words.index("-m") + 1 :]
    program, *own = words
    if program == "fedexp" and re.fullmatch(r"[a-z][a-z-]*", own[0]):
        plain = list(own[:2] if own[0] == "data" else own[:1])
        options = {word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)}
        unknown = options - set(re.findall(r"(?<![\w-])--?[a-z-]+", _help(*plain)))
        assert not unknown, f"fedexp {plain[0]} has no {', '.join(unknown)}"
    elif program in ("make", "pip"):
        shell.execute(words)
    elif program == "python" and "/" in own[0]:  # a bare name may be a file of the reader's
        shell.find(own[0])
    elif program == "flwr":
        assert own[0] in _flwr_commands(), f"flwr has no command {own[0]}"


@cache
def _help(*command: str) -> str:
    assert command[0] in COMMANDS, f"fedexp has no command {command[0]}"
    with redirect_stdout(StringIO()) as printed:
        try:
            build_parser().parse_args([*command, "--help"])
        except SystemExit:
            return printed.getvalue()
    raise AssertionError(command)


def _is_quick(task: str) -> bool:
    return task in QUICK_TASKS or ":" in task


def _limits(command: str, args: argparse.Namespace) -> list[str]:
    """Return the options that make a command small."""
    if command == "resume" and args.rounds is not None:
        return ["--rounds", "3"]  # more than the run has
    if command not in LIMITS or (command == "reproduce" and (args.list or args.source)):
        return []
    limits = list(LIMITS[command])
    if command == "compare":
        limits += ["--seeds", str(min(args.seeds, 2))]
    if command == "tune" and args.protocol == "free":
        limits += ["--trials", "2"]
    if args.device is not None:
        limits += ["--device", "cpu"]
    if args.precision is not None:
        limits += ["--precision", "float32"]
    return limits


@cache
def _resolve(words: tuple[str, ...]) -> None:
    """Build the task of `run`, `compare` or `tune` on generated data; check its options."""
    args = build_parser().parse_args(words)
    args.cohort = None  # it is parsed; generated data have fewer clients
    if words[0] == "run":
        _ = experiment_of(args).resolved
    else:
        names = args.algorithms if words[0] == "compare" else args.algorithm
        experiments(args.task, listed(names), 0, settings_of(args))  # type: ignore[arg-type]


def _resolve_study(args: argparse.Namespace) -> None:
    """Check the experiments of a study, one of each arm."""
    assert args.what in STUDIES, f"no study {args.what}"
    study = STUDIES[args.what]
    request = Request(args.rounds, args.seeds, tuple(args.task), args.scale == "small", args.mode)
    tasks, _ = choose_tasks(study, request.tasks)
    plan = Plan(study, request, tasks, rounds_of(study, request))
    for job in (job for task in tasks for job in jobs_of(plan, task)):
        if job.experiment.seed == 0:
            _ = job.experiment.resolved


class _ParsedError(BaseException):
    """Ends a script once it has parsed its arguments."""


@contextmanager
def _ends_after_parsing(*argv: str) -> Iterator[None]:
    original = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: object, **more: object) -> None:
        try:
            original(self, *given, **more)
        except SystemExit as done:
            raise AssertionError(f"{' '.join(argv)}: {self.prog} refuses it") from done
        raise _ParsedError

    with (
        patch.object(argparse.ArgumentParser, "parse_args", parse_args),
        patch("sys.argv", [*argv]),
    ):
        try:
            yield
        except _ParsedError:
            return
    raise AssertionError(f"{' '.join(argv)}: parses no arguments")


def _parse_script(path: Path, words: list[str]) -> None:
    """Let a script of the repository parse its arguments; compile one that takes none."""
    if ".parse_args(" not in path.read_text():
        assert not words, f"{path.name} takes no arguments"
        compile(path.read_text(), str(path), "exec")
        return
    with (
        patch("sys.path", [str(path.parent), str(ROOT), *sys.path]),
        _ends_after_parsing(path.name, *words),
    ):
        runpy.run_path(str(path), run_name="__main__")


def _parse_entry_point(program: str, words: list[str]) -> None:
    (found,) = entry_points(group="console_scripts", name=program)
    with _ends_after_parsing(program, *words):
        found.load()()


@cache
def _flwr_commands() -> dict[str, Any]:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of typer
        from flwr.cli.app import app
        from typer.main import get_command

        return vars(get_command(app))["commands"]


def _parse_flwr(words: list[str]) -> None:
    assert words[0] in _flwr_commands(), f"flwr has no command {words[0]}"
    _flwr_commands()[words[0]].make_context(words[0], words[1:])


def _project() -> dict[str, Any]:
    """Return the table [project] of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _check_pip(words: list[str]) -> None:
    assert words[0] == "install", f"pip {words[0]}"
    for word in words[1:]:
        if word.startswith("-") or word.endswith(".txt"):
            continue
        name = word.replace(".[", f"{PROJECT}[", 1) if word.startswith(".[") else word
        if name == ".":
            continue
        try:
            wanted = Requirement(name)
        except InvalidRequirement as error:
            raise AssertionError(f"pip install {word}: {error}") from error
        unknown = wanted.extras - set(_project()["optional-dependencies"])
        assert wanted.name != PROJECT or not unknown, f"{word}: no extra {', '.join(unknown)}"
        assert wanted.name != PROJECT or word.startswith("."), f"{word}: on no index; write ."


def _check_make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert "=" in word or word in targets, f"make {word}: the Makefile has no such target"


def _check_export(words: list[str]) -> None:
    assert all(re.match(r"[A-Z_]+=", word) for word in words), "export NAME=value"


def _check_git(words: list[str]) -> None:
    assert words[0] == "clone", f"git {words[0]}; put <!-- no-run: reason --> above"
    address = words[1].removesuffix(".git")
    assert address in _project().get("urls", {}).values(), f"{address}: not in [project.urls]"
