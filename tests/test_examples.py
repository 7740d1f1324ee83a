"""The complete studies in `examples/own_study` run from data to report; README's first snippet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedexp.cli.main import main

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "examples" / "own_study").glob("*.py"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_a_study_goes_from_data_to_report(path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) < 40
    assert not re.search(r"from fedexp|import fedexp\.", text)  # nothing below `fedexp`
    shorter = re.sub(r"rounds=\d+", "rounds=2", re.sub(r"seeds=\d", "seeds=1", text))
    (tmp_path / path.name).write_text(shorter)
    done = subprocess.run(
        [sys.executable, path.name],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "fedexp" in done.stdout
    assert (tmp_path / f"{path.stem}.html").stat().st_size > 10_000
    assert len(list((tmp_path / "runs").iterdir())) >= 2


def test_the_first_snippet_and_its_command_end_at_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text()
    snippet = re.search(r"```python\n(import fedexp as fx\n.*?)```", readme, re.DOTALL)
    command = re.search(r"`fedexp (run digits [^`]*)`", readme)
    assert snippet is not None
    assert command is not None
    names: dict[str, object] = {}
    exec(snippet[1].replace("seed=0)", "seed=0, rounds=5)"), names)
    accuracy = capsys.readouterr().out.splitlines()[-1].split()[1]
    assert main([*command[1].split(), "--rounds", "5", "--json", "--no-save"]) == 0
    assert json.loads(capsys.readouterr().out)["final"]["test_accuracy"] == float(accuracy)
    assert "Linear" in repr(names["model"])
