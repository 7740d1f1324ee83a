"""The chooser of docs/algorithms.md: a situation, what to take, why, and what was measured."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Choice:
    """A row of the chooser.

    Attributes:
        situation: what the reader has.
        take: names of pages, the first choice first.
        reason: why, and when not; links are relative to docs.
        rows: rows of the leaderboard that are shown as evidence, where two of them have runs.
        note: how to call it, behind the links.
    """

    situation: str
    take: Sequence[str]
    reason: str
    rows: Sequence[str] = ()
    note: str = ""


CHOICES = [
    Choice(**choice)
    for choice in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["choices"]
]
