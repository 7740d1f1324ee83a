"""Stored runs: one folder per run, with its spec, records, last state and model."""

from fedexp.runs.execute import RunOptions, execute, stored_outcome
from fedexp.runs.folder import RunWarning
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.pool import run_all
from fedexp.runs.read import StoredRun, find_runs, load_run
from fedexp.runs.spec import folder_of, frozen, is_run, read_spec, run_id, spec_from

__all__ = [
    "RunInterrupted",
    "RunOptions",
    "RunWarning",
    "StoredRun",
    "execute",
    "find_runs",
    "folder_of",
    "frozen",
    "is_run",
    "load_run",
    "read_spec",
    "run_all",
    "run_id",
    "spec_from",
    "stored_outcome",
]
