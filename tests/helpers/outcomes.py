"""Outcomes with known curves, for the tests of tables and figures."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.runs.spec import Outcome


def outcome(
    name: str, seed: int, curve: Sequence[float | None], diverged_at: int | None = None
) -> Outcome:
    """Return an outcome of the digits task with the given test accuracies."""
    rows = [{"test_accuracy": value} for value in curve]
    return Outcome({"task": "digits", "algorithm": name, "seed": seed}, rows, 1.0, diverged_at)
