"""Runs as they lie on the disk: to read, compare and report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedexp.errors import UsageError
from fedexp.experiments.outcome import Outcome, Row
from fedexp.runs.archive import find_archived, is_archived, read_archived
from fedexp.runs.folder import RESULT, read_environment
from fedexp.runs.foreign import parse_json, result_fault
from fedexp.runs.records import RECORDS, DamagedError, read_rows
from fedexp.runs.spec_file import SPEC, is_run, read_spec, spec_from


@dataclass(frozen=True)
class StoredRun:
    """A run folder, read.

    Attributes:
        folder: where it lies.
        spec: as in spec.toml.
        environment: as in environment.json.
        rows: one a round.
        result: as in result.json; None while the run is not over.
    """

    folder: Path
    spec: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    result: dict[str, Any] | None

    def outcome(self) -> Outcome:
        """The run as tables and figures take it; one that is not over has the rows it has."""
        result = self.result or {}
        return Outcome(
            spec_from(self.spec),
            self.rows,
            result.get("seconds", sum(row.get("seconds", 0.0) for row in self.rows)),
            result.get("diverged_at"),
            status=result.get("status", "unfinished"),
            reason=result.get("reason", ""),
            folder=self.folder,
            stored=len(self.rows),
        )


def load_run(folder: Path) -> StoredRun:
    """Read a run, finished or not, or archived. `UsageError` for what is no run or is damaged."""
    if is_archived(folder):
        parts = read_archived(folder)
        return StoredRun(folder.with_suffix(""), **vars(parts))
    spec = read_spec(folder)
    try:
        result = _read_result(folder)  # first: a run at work may end between the two
        rows = read_rows(folder)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from None
    if result is not None and len(rows) != result["rounds"]:
        raise DamagedError(f"{folder / RECORDS} has {len(rows)} of {result['rounds']} rows")
    return StoredRun(folder, spec, read_environment(folder), rows, result)


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The folders that are runs among `paths`, and the runs anywhere inside the others.

    An archived run is named by its TOML.
    """
    found: list[Path] = []
    for path in paths:
        inside = [path] if is_run(path) or is_archived(path) else _inside(path)
        if not inside:
            raise UsageError(f"there is no run in {path}; `fedexp run` and `compare` write them")
        found += inside
    return list(dict.fromkeys(found))


def _inside(path: Path) -> list[Path]:
    return [*sorted(spec.parent for spec in path.rglob(SPEC)), *find_archived(path)]


def _read_result(folder: Path) -> dict[str, Any] | None:
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        result: dict[str, Any] = parse_json(path.read_bytes())
        fault = result_fault(result)
    except ValueError:
        fault = "it is not JSON"
    if fault is not None:
        raise UsageError(f"{path} is damaged; remove it and run `fedexp resume {folder}`")
    return result
