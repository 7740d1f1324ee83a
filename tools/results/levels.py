"""Rounds to other accuracies than the paper's target: where one algorithm overtakes another."""

from __future__ import annotations

from fedexp.reproduce.measures import rounds_to_target
from fedexp.reproduce.published import target, text_of
from tools.results.gather import Results
from tools.results.words import algorithm_name, paragraphs, percent, table, task_name

POINTS = (-20, -10, -5, 0, 2, 4)  # around the target, the same for every task


def levels(results: Results) -> str:
    """A table a task: mean rounds to accuracies around the target."""
    studied = results.studies["table1"]
    parts = []
    for task, series in studied.groups.items():
        goals = [target(task) + points / 100 for points in POINTS]
        rows = [
            [
                algorithm_name(name),
                *(
                    text_of(rounds_to_target(runs, goal, studied.plan.rounds), "rounds")
                    for goal in goals
                ),
            ]
            for name, runs in series.items()
        ]
        parts.append(table([f"{task_name(task)}, rounds to", *map(percent, goals)], rows))
    return paragraphs(*parts) or "No runs yet."
