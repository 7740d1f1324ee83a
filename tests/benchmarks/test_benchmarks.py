"""Scripts of benchmarks run on small work, and the documents have the numbers of the records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DOCS = BENCHMARKS.parent / "docs" / "coming-from"
NO_SIMULATORS = ("index", "torchft")
PAGES = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in NO_SIMULATORS)
HARDWARE = "AMD EPYC, 2 cores, load 0.1, Python 3.11.7, torch 2.13.0"
WORK = {"precision": "bf16", "variant": "graph", "algorithm": "fedexp", "engine": "batched"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a script."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # scripts import `machine`

    def load(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


def write(folder: Path, name: str, rows: list[dict[str, Any]], **more: Any) -> None:
    record = {"date": name[:10], "hardware": HARDWARE, **more, "rows": rows}
    (folder / name).write_text(json.dumps(record))


def test_numbers_of_the_documents_are_those_of_the_records(script: Any) -> None:
    table = script("table")
    for path, text in table.documents(table.measurements()).items():
        assert path.read_text() == text, "python benchmarks/table.py --write"


def test_the_best_configuration_of_a_peer_counts(script: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"contestant": name, "requested": engine, "work": "W2", "turns": [ms, ms + 8], "ms": ms + 4}
        for name, ms, engine in (
            ("fedexp, threads", 100, "auto"),
            ("fedexp, loop", 50, "loop"),
            ("pfl", 400, ""),
            ("pfl", 204, ""),
        )
    ]
    rows.append({"contestant": "pfl", "work": "W2", "error": "x"})
    write(tmp_path, "2026-01-02-cpu-peers.json", rows)
    (one,) = script("table").measurements(tmp_path)
    assert (one.ms, one.low, one.high, one.turns) == (104, 100, 108, 2)
    assert (one.other, one.other_ms, one.ratio) == ("pfl", 208, 2.0)


def test_the_newest_record_of_a_piece_of_work_counts(script: Any, tmp_path: Path) -> None:
    old = [{**WORK, "work": "A", "ms": 2.0}, {**WORK, "work": "B", "ms": 3.0}]
    new = [{**WORK, "work": "A", "ms": 1.0}, {**WORK, "work": "A", "ms": 9.0, "variant": "eager"}]
    more = {"hardware": "NVIDIA H200, 16 cores"}
    write(tmp_path, "2026-01-01-h200-rounds.json", old, **more)
    write(tmp_path, "2026-01-02-h200-rounds.json", new, **more)
    more["superseded_by"] = "2026-01-02-h200-rounds.json"
    write(tmp_path, "2026-01-03-h200-rounds.json", old, **more)
    rows = script("table").measurements(tmp_path)
    assert {one.work: one.ms for one in rows} == {"round, A, bf16": 1.0, "round, B, bf16": 3.0}


def test_the_comparison_benchmark_writes_a_record(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["comparison.py", "--tiny", "--turns", "1", "--seeds", "1", "--algorithms", "fedexp"]
    out = tmp_path / "2026-01-02-comparison.json"
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(out)])
    script("comparison").main()
    (one,) = script("table").measurements(tmp_path)
    assert one.work == "fedexp compare, digits MLP, 1 runs of 2 rounds"
    assert one.ratio == pytest.approx(one.other_ms / one.ms)


def test_the_standard_benchmark_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(BENCHMARKS / "standard.py"), "--task", "mnist", "--turns", "1"]
    command += ["--generated", "--loop", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    record = json.loads(out.read_text())
    named = [(row["contestant"], row["engine"]) for row in record["rows"]]
    assert named[:3] == [("fedexp", "dense"), ("fedexp", "loop"), ("sequential PyTorch", "")]
    assert all(row["ms"] > 0 and row["turns"] == 1 for row in record["rows"])


def test_pages_for_users_of_other_packages(script: Any) -> None:
    """Each has its program and ours, which has the accuracy that is recorded."""
    module = script("coming_from")
    assert sorted(module.PACKAGES) == PAGES
    for page in PAGES:
        program, ours = module.blocks(page)
        compile(program, page, "exec")
        assert ours == module.blocks("flower")[1]
    path = max((BENCHMARKS / "records").glob("*-coming-from.json"))
    row = json.loads(path.read_text())["rows"][1]
    assert (row["package"], row["algorithm"]) == ("FedExP", "fedexp")
    measured = module.accuracy(ours.replace('"fedavg"', '"fedexp"'), 0, sys.executable)
    assert measured == pytest.approx(row["accuracies"][0], abs=0.01)  # 4 of 397 images
