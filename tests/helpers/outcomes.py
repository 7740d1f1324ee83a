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
    spec = {"task": "digits", "algorithm": name, "seed": seed, "rounds": len(rows)}
    return Outcome(spec, rows, 1.0, diverged_at)
