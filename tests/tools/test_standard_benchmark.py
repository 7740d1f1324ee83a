"""`benchmarks/standard.py` runs on generated data, writes its record, and names missing data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "standard.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--task", "mnist", "--turns", "1", *options]
    environment = {**os.environ, "FEDEXP_DATA": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=True)


def test_a_dry_run(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    done = run(tmp_path, "--generated", "--loop", "--out", str(out))
    record = json.loads(out.read_text())
    named = [(row["contestant"], row["engine"]) for row in record["rows"]]
    assert named[:3] == [("fedexp", "dense"), ("fedexp", "loop"), ("sequential PyTorch", "")]
    assert all(row["ms"] > 0 and row["turns"] == 1 for row in record["rows"])
    assert record["generated"] is True
    assert record["published"]["shakespeare"]["flute"] == "00:21:50"
    assert "published, other hardware: FLUTE 950, FedML 1,890 ms per round" in done.stdout


def test_missing_data_are_named(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert "mnist: skipped; mnist is not in" in done.stderr
    assert "or use --generated" in done.stderr
