"""Where the command begins: Ctrl-C while everything is imported, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = "import sys, fedexp_command; sys.exit(fedexp_command.main())"
TELL = """
import sys, fedexp_command
try:
    fedexp_command.main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def python(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ctrl_c_while_importing_ends_in_silence(tmp_path: Path) -> None:
    package = tmp_path / "fedexp"
    package.mkdir()
    (package / "__init__.py").write_text("raise KeyboardInterrupt")
    ended = python(BEGIN, PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_the_command_begins_and_gives_its_status_back() -> None:
    ended = python(BEGIN, "toyy")
    assert ended.returncode == 2
    assert "invalid choice: 'toyy'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("command", "spared"),
    [
        ("compare toy --json --format csv", ["reproduce", "flower", "cli.data", "cli.tune"]),
        ("data show nothing", ["api", "tuning", "cli.compare"]),
    ],
)
def test_a_command_does_not_import_the_others(command: str, spared: list[str]) -> None:
    words = command.split()
    printed = python(TELL, *words)
    modules = printed.stderr.splitlines()[-1].split()
    assert f"fedexp.cli.{words[0]}" in modules
    assert not {f"fedexp.{name}" for name in spared} & set(modules)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_torch_and_is_that_of_the_parser(flag: str) -> None:
    ended = python(TELL, flag, COLUMNS="80")
    assert not {"torch", "fedexp", "numpy"} & set(ended.stderr.splitlines()[-1].split())
    whole = python("from fedexp.cli.main import main; main(['--help'])", COLUMNS="80")
    assert ended.stdout == whole.stdout != ""
