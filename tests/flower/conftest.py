"""Clients of these tests keep their states in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Never the user's own."""
    monkeypatch.setenv("FEDEXP_STATE", str(tmp_path / "client-state"))
    return tmp_path / "client-state"
