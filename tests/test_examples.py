"""The complete studies in `examples/own_study` run from data to report; README's first snippet."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedexp as fx
from fedexp.cli.main import main
from fedexp.seeding import seeded_torch

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


@pytest.mark.parametrize("fedexp", [False, True], ids=["fedavg", "fedexp"])
def test_a_round_in_plain_torch_equals_simulate(fedexp: bool) -> None:
    path = ROOT / "examples" / "round.py"
    assert len(path.read_text().splitlines()) <= 100
    page: dict[str, Any] = runpy.run_path(str(path))
    digits = fx.tasks.digits().train
    train = replace(digits, fields={**digits.fields, "x": digits.fields["x"].double()})
    clients = [(batch["x"], batch["y"]) for batch in map(train.client, range(train.clients))]

    def build() -> nn.Module:
        return nn.Linear(64, 10).double()

    task = fx.supervised("round", build, train, local=page["LOCAL"], cohort=page["COHORT"])
    algorithm = fx.fedexp(eps=page["EPS"], eps_mode="absolute") if fedexp else fx.fedavg()
    records = fx.simulate(task, algorithm, page["ROUNDS"], seed=page["SEED"], engine="loop")
    with seeded_torch(page["SEED"], "initial weights"):
        rounds = page["train"](build(), clients, fedexp)
    for record, (step, output) in zip(records, rounds, strict=True):
        assert record.server_lr == pytest.approx(step, rel=1e-12)
        torch.testing.assert_close(record.state.output()[0], output, rtol=1e-11, atol=1e-13)
