"""The table of records, and the figures of the documents, which are computed from it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
HARDWARE = "AMD EPYC, 2 cores, load 0.1, Python 3.11.7, torch 2.13.0"


@pytest.fixture(scope="module")
def table() -> Any:
    spec = importlib.util.spec_from_file_location("table", BENCHMARKS / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["table"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    record = {"date": name[:10], "hardware": HARDWARE, **more, "rows": rows}
    (folder / name).write_text(json.dumps(record))


def peer(name: str, ms: float, requested: str = "") -> dict[str, Any]:
    row = {"contestant": name, "requested": requested, "work": "W2", "turns": [ms, ms + 8]}
    return {**row, "ms": ms + 4}


def test_figures_of_the_documents_are_those_of_the_records(table: Any) -> None:
    for path, text in table.documents(table.measurements()).items():
        assert path.read_text() == text, "python benchmarks/table.py --write"


def test_the_best_configuration_of_a_peer_counts(table: Any, tmp_path: Path) -> None:
    rows = [peer("fedexp, threads", 100, "auto"), peer("fedexp, loop", 50, "loop")]
    rows += [peer("pfl", 400), peer("pfl", 204), {"contestant": "pfl", "work": "W2", "error": "x"}]
    write(tmp_path, "2026-01-02-cpu-peers.json", rows)
    (one,) = table.measurements(tmp_path)
    assert (one.ms, one.low, one.high, one.turns) == (104, 100, 108, 2)
    assert (one.other, one.other_ms, one.ratio) == ("pfl", 208, 2.0)
    assert (one.device, one.date) == ("2 cores", "2026-01-02")
    assert "load" not in one.hardware


def test_the_newest_record_of_a_piece_of_work_counts(table: Any, tmp_path: Path) -> None:
    row = {"precision": "bf16", "variant": "graph", "algorithm": "fedexp", "engine": "batched"}
    old = [{**row, "work": "A", "ms": 2.0}, {**row, "work": "B", "ms": 3.0}]
    write(tmp_path, "2026-01-01-h200-rounds.json", old, hardware="NVIDIA H200, 16 cores")
    new = [{**row, "work": "A", "ms": 1.0}, {**row, "work": "A", "ms": 9.0, "variant": "eager"}]
    write(tmp_path, "2026-01-02-h200-rounds.json", new, hardware="NVIDIA H200, 16 cores")
    more = {"hardware": "NVIDIA H200, 16 cores", "superseded_by": "2026-01-02-h200-rounds.json"}
    write(tmp_path, "2026-01-03-h200-rounds.json", old, **more)
    rows = table.measurements(tmp_path)
    found = {one.work: (one.ms, one.engine) for one in rows}
    assert found == {"round, A, bf16": (1.0, "batched"), "round, B, bf16": (3.0, "batched")}
    assert "| A, bf16 | H200 | 1 | batched |" in table.round_times(rows)


def test_comparisons_are_compared_with_separate_runs(table: Any, tmp_path: Path) -> None:
    row = {"work": "fedexp compare", "runs": 20, "ms": 5.0, "ms_min": 4.0, "ms_max": 6.0}
    write(tmp_path, "2026-01-02-comparison.json", [{**row, "turns": 3, "separate_ms": 50.0}])
    (one,) = table.measurements(tmp_path)
    assert one.cells()[:7] == ["fedexp compare", "2 cores", "5 (4-6)", "3",
                               "20 times one `fedexp run`", "50", "10"]  # fmt: skip


def test_a_document_without_the_block_is_refused(table: Any) -> None:
    with pytest.raises(ValueError, match="no block 'speed'"):
        table.with_block("text", "speed", "new")


def test_the_comparison_benchmark_writes_a_record(table: Any, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "comparison.py"), "--tiny", "--turns", "1"]
    command += ["--seeds", "2", "--algorithms", "fedavg,fedexp"]
    out = tmp_path / "2026-01-02-comparison.json"
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, timeout=600)
    (one,) = table.measurements(tmp_path)
    assert one.work == "fedexp compare, digits MLP, 4 runs of 2 rounds"
    assert one.ratio == pytest.approx(one.other_ms / one.ms)
