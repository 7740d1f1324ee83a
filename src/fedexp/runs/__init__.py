"""Stored runs: one folder per run, with its spec, records, last state and model."""

from fedexp.runs.execute import Storage, execute, stored_outcome
from fedexp.runs.folder import RunWarning
from fedexp.runs.journal import RunInterrupted
from fedexp.runs.pool import run_all
from fedexp.runs.read import StoredRun, find_runs, load_run
from fedexp.runs.spec import Outcome, folder_of, is_run, read_spec

__all__ = [
    "Outcome",
    "RunInterrupted",
    "RunWarning",
    "Storage",
    "StoredRun",
    "execute",
    "find_runs",
    "folder_of",
    "is_run",
    "load_run",
    "read_spec",
    "run_all",
    "stored_outcome",
]
