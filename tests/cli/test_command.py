"""Where the command begins: Ctrl-C while everything is imported, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedexp_command
from fedexp.cli.main import main

BEGIN = "import sys, fedexp_command; sys.exit(fedexp_command.main())"
LISTS = """
import os, sys
from fedexp.cli.main import main
for command in sys.argv[1:]:
    if os.fork() == 0:
        main([command, "--nope"])
        print(*sys.modules)
        sys.exit()
    os.wait()
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


def test_the_command_begins_and_gives_its_status_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedexp", "toyy"])
    assert fedexp_command.main() == 2
    error = capsys.readouterr().err
    assert "invalid choice: 'toyy'" in error
    assert "Traceback" not in error


def test_a_command_does_not_import_the_others() -> None:
    spared = {"compare": ["studies", "report", "cli.data"], "data": ["cli.compare", "studies"]}
    lists = python(LISTS, *spared).stdout.splitlines()
    for (command, others), printed in zip(spared.items(), lists, strict=True):
        modules = printed.split()
        assert f"fedexp.cli.{command}" in modules
        assert not {f"fedexp.{name}" for name in others} & set(modules)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_needs_no_torch_and_is_that_of_the_parser(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = f"{BEGIN[: BEGIN.index('sys.exit')]} fedexp_command.main(); print(*sys.modules)"
    ended = python(begin, flag, COLUMNS="80")
    *shown, modules = ended.stdout.splitlines()
    assert not {"torch", "fedexp", "numpy"} & set(modules.split())
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert shown == capsys.readouterr().out.splitlines()
