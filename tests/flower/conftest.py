"""Fixtures of the Flower tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of client state: one per test, never the user's own."""
    monkeypatch.setenv("FEDEXP_STATE", str(tmp_path / "client-state"))
    return tmp_path / "client-state"


class LineHandler(logging.Handler):
    """Collects the messages of warnings and errors."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """The lines that Flower's logger has emitted so far, warnings and errors only."""
    handler = LineHandler()
    logging.getLogger("flwr").addHandler(handler)
    yield handler.lines
    logging.getLogger("flwr").removeHandler(handler)
