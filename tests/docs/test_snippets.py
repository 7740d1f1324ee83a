"""Every block of code and every command in README and docs runs; see `snippets` and `commands`.

A page runs from top to bottom in a folder of its own, in one namespace. Its Python is also the file
`study.py` in that folder, so that a command can name `study.py:task`. Wrappers limit `simulate`,
`run`, `compare` and `tune` to two rounds, two seeds and one process, and the paper's grids to two
values per option; commands get smaller options.
"""

from __future__ import annotations

import inspect
import json
import linecache
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedexp.api
import fedexp.flower
from fedexp import Experiment, SimulationState
from fedexp.options import Setup
from fedexp.tuning import grids
from fedexp.tuning.grids import Values, paper_grid
from tests.docs.commands import ROOT, Shell, check_inline
from tests.docs.snippets import Block, Page, PageError, agree, parse_page, split_commands
from tests.helpers.generated_data import write_all

ROUNDS, SEEDS = 2, 2
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks" / "README.md",
        *(ROOT / "examples").rglob("README.md"),
        *(ROOT / "integrations").rglob("README.md"),
        *(ROOT / "docs").rglob("*.md"),
    )
    if "decisions" not in path.parts
)
# Blocks that are compiled or parsed only, by their reason. A new one is added here on purpose.
NO_RUN = {
    "needs a clone of PFLlib": 1,
    "needs fedjax": 1,
    "needs fluke-fl": 1,
    "needs flwr and ray": 1,
    "needs pfl": 1,
    "needs torchft and a lighthouse": 2,
    "study.py is the block above": 1,
    "study.py is the reader's": 1,
    "needs a copy of examples/flower_app": 1,
    "needs a SuperLink": 3,
}


def parsed(name: str) -> Page:
    try:
        return parse_page((ROOT / name).read_text())
    except PageError as error:
        raise PageError(f"{name}, {error}") from None


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small generated version of every data set."""
    folder = tmp_path_factory.mktemp("data")
    write_all(folder)
    return folder


@pytest.fixture
def scratch(tmp_path: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, in which runs are short and client state stays."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDEXP_DATA", str(data_folder))
    monkeypatch.setenv("FEDEXP_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("FEDEXP_RUNS", raising=False)
    for name in ("run", "compare", "tune"):
        monkeypatch.setattr(fedexp.api, name, limited(getattr(fedexp.api, name)))
    monkeypatch.setattr(fedexp, "simulate", limited(fedexp.simulate))
    monkeypatch.setattr(grids, "paper_grid", small_grid)
    strategy = fedexp.flower.RuleStrategy
    monkeypatch.setattr(strategy, "start", limited(strategy.start, rounds="num_rounds"))
    return tmp_path


def limited(function: Callable[..., Any], rounds: str = "rounds") -> Callable[..., Any]:
    """Return the function with at most `ROUNDS` rounds, `SEEDS` seeds, and one process."""
    signature = inspect.signature(function)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    variable = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = signature.bind(*args, **kwargs).arguments
        values |= values.pop(variable, {})
        start, task = values.get("start"), values.get("task")
        most = ROUNDS + (start.round if isinstance(start, SimulationState) else 0)
        if isinstance(task, Experiment) and "folder" in values:
            pass  # of a command, which has got smaller options
        elif isinstance(task, Experiment):
            values["task"] = task.replace(rounds=min(task.rounds or most, most))
        else:
            values[rounds] = min(values.get(rounds) or most, most)
        if isinstance(values.get("seeds"), int):
            values["seeds"] = min(values["seeds"], SEEDS)
        if "jobs" in values:
            values["jobs"] = 1
        first = values.pop("self", None)
        return function(**values) if first is None else function(first, **values)

    return call


def small_grid(setup: Setup, least_squares: bool) -> Values:
    """Return the first two values of each option of the paper's grid."""
    return {name: values[:2] for name, values in paper_grid(setup, least_squares).items()}


class Study:
    """The Python of a page, as the file `study.py` that is being run.

    Lines have the numbers that they have in the page.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._lines = folder / "study.py", list[str]()
        self.module = ModuleType("__main__")
        self.module.__file__ = str(self._path)

    def execute(self, block: Block) -> None:
        first = block.line - 1
        self._lines += [""] * (first - len(self._lines))
        self._lines += block.text.splitlines()
        self._path.write_text("\n".join(self._lines) + "\n")
        linecache.checkcache(str(self._path))
        exec(compile("\n" * first + block.text, str(self._path), "exec"), vars(self.module))


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = parsed(name)
    study, shell = Study(scratch), Shell(scratch, ROOT / name)
    monkeypatch.setitem(sys.modules, "__main__", study.module)
    for block in page.blocks:
        try:
            execute(block, study, shell)
        except BaseException as error:
            error.add_note(f"in {name}, the block at line {block.line}")
            raise
    for line, command in page.inline:
        try:
            check_inline(command, shell)
        except Exception as error:
            error.add_note(f"in {name}, line {line}: {command}")
            raise


def execute(block: Block, study: Study, shell: Shell) -> None:
    """Run a block, or as much of it as there is to run."""
    if block.kind == "python":
        if block.no_run is None:
            study.execute(block)
        else:
            compile(block.text, "block", "exec")
    elif block.kind == "commands":
        for words in split_commands(block.text):
            if block.no_run is None:
                shell.execute(words)
    elif block.kind == "toml":
        tomllib.loads(block.text)
    elif block.kind == "json":
        json.loads(block.text)


def test_blocks_that_do_not_run_are_listed() -> None:
    reasons = Counter(
        block.no_run for name in PAGES for block in parsed(name).blocks if block.no_run is not None
    )
    assert reasons == Counter(NO_RUN)


def test_readme_starts_with_two_commands_and_the_first_prints_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formula, commands, printed = parsed("README.md").blocks[:3]
    assert formula.text.startswith("eta_g = ")
    (demo, test) = split_commands(commands.text)
    assert (demo, test, printed.kind) == (["make", "demo"], ["make", "test"], "text")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "ready"):  # what is installed already
        (tmp_path / name).touch()
    for name in ("MAKEFLAGS", "MAKELEVEL", "FEDEXP_RUNS"):
        monkeypatch.delenv(name, raising=False)
    here = [f"BIN={Path(sys.executable).parent}", "READY=ready"]
    made = subprocess.run([*demo, *here], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = made.stdout.splitlines()
    first = lines.index(printed.text.splitlines()[0])
    found = "\n".join(lines[first:])
    assert agree(found, printed.text), f"{found}\nwhere README has:\n{printed.text}"
    assert (tmp_path / "out" / "toy.png").stat().st_size > 10_000


# The checks themselves ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        "```\nx = 1\n```",
        "```rust\nlet x = 1;\n```",
        "Text:\n\n    import fedexp\n",
        "Text:\n\n    x = 1\n",
        "Text:\n\n    # a job\n    cp a b\n    fedexp toy\n",
        "Text:\n\n    a,b\n    c = [1, 2]\n",
    ],
)
def test_a_block_of_unknown_kind_is_refused(page: str) -> None:
    with pytest.raises(PageError, match="say what this block is"):
        parse_page(page)


def test_the_code_of_a_page_is_found() -> None:
    page = parse_page(
        """<!-- a remark -->
<!-- setup
x = 1
-->
1. In a list, `fedexp report RUNS
   -o page.html`:

    prose of the same item

    ```python title="a.py"
    y = x
    ```

A formula, then a command:

    eta = max(1, a / (2 (b + c)))

    fedexp toy

<!-- no-run: needs ssh -->
```console
ssh there
```
"""
    )
    found = [(block.line, block.kind, block.text, block.no_run) for block in page.blocks]
    assert found[:2] == [(3, "python", "x = 1", None), (11, "python", "y = x", None)]
    assert found[-1] == (22, "commands", "ssh there", "needs ssh")
    assert page.blocks[0].is_hidden
    assert page.inline == [(5, "fedexp report RUNS    -o page.html")]


def test_a_reason_without_a_block_is_refused() -> None:
    with pytest.raises(PageError, match="line 1: no block follows"):
        parse_page("<!-- no-run: no GPU -->\nText.")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("fedexp run digits --no-such-option", "unrecognized arguments"),
        ("fedexp run digits --algorithm fedxp", "fedexp run digits"),
        ("fedexp run cifar10 --algorithm fedxp", "did you mean"),
        ("fedexp run nothing", "unknown task"),
        ("fedexp compare cifar10 --set epps=1", "epps"),
        ("fedexp tune shakespeare --set task.model=9", "one of lstm, transformer"),
        ("fedexp reproduce table9", "no study table9"),
        ("fedexp reproduce table1 --task digits", "unknown task of table1"),
        ("fedexp data fetch nothing", "unknown data set"),
        ("fedexp resume runs/digits-...", "no command above has made such a path"),
        ("torchrun --nproc-per-node 8 -m fedexp run cifar10 --devices cuda", "unrecognized"),
        ("torchrun --no-such-option 8 -m fedexp run cifar10", "refused"),
        ("python no_such_script.py", "neither in"),
        ("python -m tools.no_such_tool", "no such module"),
        ("python -m tools.leaderboard --no-such-option", "refuses it"),
        ("python benchmarks/standard.py --no-such-option", "refuses it"),
        ("make nothing", "no such target"),
        ("pip install '.[nothing]'", "no extra nothing"),
        ("pip install 'fedexp[all]'", "on no index"),
        ("flwr run . --no-such-option", "No such option"),
        ("flower-supernode --no-such-option", "refuses it"),
        ("git clone https://example.org/other", "not in"),
        ("docker run fedexp", "not known here"),
    ],
)
def test_a_wrong_command_is_refused(command: str, message: str, scratch: Path) -> None:
    (words,) = split_commands(command)
    with pytest.raises(Exception, match=message):
        Shell(scratch, ROOT / "README.md").execute(words)


@pytest.mark.parametrize(
    "command",
    [
        "fedexp trains",
        "fedexp run TASK --ruonds 3",
        "make nothing",
        "flwr go",
        "python tools/no.py",
    ],
)
def test_a_wrong_command_in_a_sentence_is_refused(command: str, scratch: Path) -> None:
    with pytest.raises(AssertionError):
        check_inline(command, Shell(scratch, ROOT / "README.md"))
