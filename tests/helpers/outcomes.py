"""Outcomes with known curves, for the tests of tables and figures."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.runs.spec import Outcome


def outcome(
    name: str,
    seed: int,
    curve: Sequence[float | None],
    diverged_at: int | None = None,
    metric: str = "test_accuracy",
) -> Outcome:
    """Return an outcome of the digits task with these values of a metric."""
    rows = [{metric: value} for value in curve]
    return Outcome({"task": "digits", "algorithm": name, "seed": seed}, rows, 1.0, diverged_at)
