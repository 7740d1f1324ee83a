"""Stored runs: run folders and archived runs, read for tables, figures and reports.

An archived run is two small text files for a repository: a CSV of its rounds, and a TOML with its
spec, environment and result.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedexp.errors import DamagedError, UsageError, require, shown
from fedexp.experiment import Row
from fedexp.plain import id_of
from fedexp.runs.folder import RESULT, read_environment
from fedexp.runs.records import RECORDS, read_rows, result_fault, row_fault
from fedexp.runs.spec import (
    FORMAT,
    SPEC,
    TRIALS,
    Outcome,
    check_format,
    is_run,
    read_spec,
    spec_fault,
    without_id,
)
from fedexp.storage import parse_json, parse_toml

HEAD = "# A run of fedexp, archived. Its rounds are in the CSV of the same name.\n"
DIGITS = 7  # significant digits of a 32-bit float
TIME_DIGITS = 4
# Of the environment, without command and platform, which name folders and machines.
ARCHIVED = (
    *("fedexp", "python", "torch", "numpy", "device", "threads", "started"),
    *("metric", "goal", "target"),
    "git",  # commits of the code
    "engine",  # the engine that trained, and why
    "note",  # remark of whoever archives the run
)


@dataclass(frozen=True)
class StoredRun:
    """The content of a run folder, or of an archived run.

    Attributes:
        folder: its path.
        spec: as in spec.toml.
        environment: as in environment.json.
        rows: one per round.
        result: as in result.json; None while the run is not over.
    """

    folder: Path
    spec: dict[str, Any]
    environment: dict[str, Any]
    rows: list[Row]
    result: dict[str, Any] | None

    def outcome(self) -> Outcome:
        """Return the run for tables and figures; "unfinished" where it is not over."""
        spec, result = without_id(self.spec), self.result or {}
        return Outcome.of(spec, self.rows, result, folder=self.folder, stored=len(self.rows))


def load_run(folder: Path) -> StoredRun:
    """Read a run, finished or not, or archived; raise `UsageError` for one that is damaged."""
    if is_archived(folder):
        return read_archived(folder)
    spec = read_spec(folder)
    rows, result = rows_and_result(folder)
    return StoredRun(folder, spec, read_environment(folder), rows, result)


def rows_and_result(folder: Path) -> tuple[list[Row], Any]:
    """Read the rows of a run, see `read_rows`, and `result.json`, None while it is not over."""
    try:
        result = _read_result(folder)  # first: a run that is training may end between the two
        rows = read_rows(folder)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from None
    if result is not None and len(rows) != result["rounds"]:
        raise DamagedError(f"{folder / RECORDS} has {len(rows)} of {result['rounds']} rows")
    return rows, result


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the run folders among `paths`, and all runs inside other folders.

    Trials are left out, unless a path is theirs. An archived run is named by its TOML.
    """
    folders: list[Path] = []
    for path in paths:
        inside = [path] if is_run(path) or is_archived(path) else _inside(path)
        if not inside:
            raise UsageError(f"there is no run in {path}; `fedexp run` and `compare` write them")
        folders += inside
    return list(dict.fromkeys(folders))


def _inside(path: Path) -> list[Path]:
    folders = sorted(spec.parent for spec in path.rglob(SPEC))
    runs = [folder for folder in folders if TRIALS not in folder.relative_to(path).parts]
    return [*runs, *sorted(toml for toml in path.rglob("*.toml") if is_archived(toml))]


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


def is_archived(path: Path) -> bool:
    """Return whether a file is the TOML of an archived run."""
    if path.suffix != ".toml" or path.name == SPEC or not path.with_suffix(".csv").is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(HEAD)) == HEAD.encode()


def texts(run: StoredRun) -> tuple[str, str]:
    """Return the TOML and the CSV of a run that is over.

    A column with a single value is a line of the TOML; one without any is left out.
    """
    assert run.result is not None
    columns = {
        name: [_rounded(name, row.get(name)) for row in run.rows] for name in _names(run.rows)
    }
    constant = {
        name: values[0]
        for name, values in columns.items()
        if name != "round" and all(value == values[0] for value in values)
    }
    varying = [name for name in columns if name not in constant]
    table = _csv(varying, [[columns[name][at] for name in varying] for at in range(len(run.rows))])
    spec = without_id(run.spec)
    described = {
        "format": FORMAT,
        "id": id_of(spec),
        "result": {n: _rounded(n, value) for n, value in _without_nulls(run.result).items()},
        "environment": _without_nulls({name: run.environment.get(name) for name in ARCHIVED}),
        "constant": constant,
        "spec": spec,
    }
    return HEAD + tomli_w.dumps({"sha256": _digest(described, table), **described}), table


def read_archived(path: Path) -> StoredRun:
    """Read a run from its TOML and CSV; refuse one that was changed since it was archived."""
    try:
        described = parse_toml(path.read_text(encoding="utf-8"))
        table = path.with_suffix(".csv").read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {shown(error)}; archive the run again") from None
    _check(path, described, table)
    spec = described["spec"]
    rows = _rows(path, described["constant"], table)
    result = {"diverged_at": None, **described["result"]}
    identity = {"format": described["format"], "id": described["id"]}
    folder, environment = path.with_suffix(""), described["environment"]
    return StoredRun(folder, {**identity, **spec}, environment, rows, result)


def _check(path: Path, described: Mapping[str, Any], table: str) -> None:
    check_format(described, path)
    content = {name: value for name, value in described.items() if name != "sha256"}
    require(
        described.get("sha256") == _digest(content, table),
        f"{path} or its CSV has been changed since it was archived; put it back, or archive the "
        "run again with --replace",
    )
    tables = ("spec", "constant", "environment", "result")
    whole = all(isinstance(described.get(name), dict) for name in tables)
    fault = "a part is missing" if not whole else spec_fault(described["spec"])
    fault = fault or result_fault(described["result"])
    if fault is None and not isinstance(described.get("id"), str):
        fault = "it has no id"
    require(fault is None, f"{path} is not an archived run: {fault}; archive the run again")


def _rows(path: Path, constant: Mapping[str, Any], table: str) -> list[Row]:
    """Return the rows of the CSV, with the columns of a single value."""
    again = "archive the run again"
    try:
        cells = csv.DictReader(io.StringIO(table))
        rows = [
            {**constant, **{name: _number(cell) for name, cell in row.items()}} for row in cells
        ]
    except (ValueError, TypeError, AttributeError, csv.Error):
        raise UsageError(f"the CSV of {path} holds something other than numbers; {again}") from None
    for number, row in enumerate(rows, start=1):
        fault = row_fault(row, number)
        require(fault is None, f"the CSV of {path} is damaged at line {number}: {fault}; {again}")
    return rows


def _names(rows: Sequence[Row]) -> list[str]:
    """Return the columns with any number, in order, and the round."""
    names = dict.fromkeys(["round", *(name for row in rows for name in row)])
    return [n for n in names if n == "round" or any(row.get(n) is not None for row in rows)]


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without nulls, which TOML does not have, at any depth."""
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in values.items()
        if value is not None
    }


def _rounded(name: str, value: Any) -> Any:
    return float(_cell(name, value)) if isinstance(value, float) else value


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_cell(n, v) for n, v in zip(names, row, strict=True)] for row in rows)
    return text.getvalue()


def _cell(name: str, value: Any) -> Any:
    """Return a value for the CSV, which writes None as an empty cell: floats as rounded text.

    >>> _cell("train_loss", 0.123456789), _cell("seconds", 1.23456), _cell("round", 500)
    ('0.1234568', '1.235', 500)
    """
    digits = TIME_DIGITS if name == "seconds" else DIGITS
    return f"{value:.{digits}g}" if isinstance(value, float) else value


def _number(cell: str) -> int | float | None:
    if not cell:
        return None
    return int(cell) if cell.lstrip("-").isdecimal() else float(cell)


def _digest(described: Mapping[str, Any], table: str) -> str:
    text = json.dumps(described, sort_keys=True, default=str) + table
    return hashlib.sha256(text.encode()).hexdigest()
