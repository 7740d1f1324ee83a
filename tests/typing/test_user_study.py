"""A user's file type-checks under `mypy --strict` and runs; mistakes in it are found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedexp

pytest.importorskip("mypy", reason="needs mypy")
pytest.importorskip("flwr", reason="needs fedexp[flower]")
pytest.importorskip("dp_accounting", reason="needs fedexp[privacy]")

from tests.typing import user_study

SOURCE = Path(fedexp.__file__).parents[1]
CACHE = Path(__file__).parents[2] / ".mypy_cache" / "user_study"  # apart from the project's own
STUDY = Path(__file__).with_name("user_study.py")
WRONG = """
import fedexp as fx
from fedexp.flower import FedExP
from fedexp.privacy import CentralPrivacy

FedExP(epss=1.0)
FedExP(eps="small")
FedExP(eps_mode="absolut")
fx.simulate(5, fx.fedexp())
fx.simulate(fx.tasks.digits(), fx.fedexp(), privacy=8.0)
CentralPrivacy(clip=1.0, delta=1e-5, epsilon=8.0, sampling="secret")
"""


def check(*files: Path) -> tuple[int, str]:
    """Return the exit status and the output of mypy with a user's settings: strict, no config."""
    options = [
        "--strict",
        "--config-file=",
        "--follow-imports=silent",  # as an installed package: its types are used, not checked
        "--no-error-summary",
        "--hide-error-context",
        f"--cache-dir={CACHE}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files)],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_public_api_is_typed(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    study = tmp_path / STUDY.name
    study.write_text(STUDY.read_text())
    status, output = check(study, wrong)
    assert status == 1, output
    errors = [line for line in output.splitlines() if ": error: " in line]
    assert not [line for line in errors if STUDY.name in line], output
    expected = ["call-arg", *["arg-type"] * 5]
    assert [line.rsplit("[")[-1].rstrip("]") for line in errors] == expected, output


@pytest.mark.filterwarnings("ignore::fedexp.privacy.PrivacyWarning")
def test_the_study_runs() -> None:
    found = user_study.final_accuracies()
    assert found.keys() == {"fedavg", "fedexp", "scaffold-exp", "sign"}
    central, local = user_study.spent()
    assert 0 < central <= 8.0
    assert local > 0
    assert [each.settings.algorithm.name for each in user_study.strategies()] == [
        "fedexp",
        "fedexp",
        "fedavgm",
        "fedadam",
        "sign",
    ]
