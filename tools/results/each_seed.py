"""Final accuracies seed by seed: a mean hides a seed that came to nothing."""

from __future__ import annotations

from fedexp.reproduce.accuracy_studies import FINAL
from fedexp.reproduce.measures import final
from fedexp.reproduce.published import text_of
from fedexp.runs.spec import Outcome
from tools.results.gather import Studied
from tools.results.words import algorithm_name, table, task_name


def each_seed(studied: Studied) -> str:
    """A column a seed, for the tasks of which some series has several."""
    columns = studied.findings.table.columns if studied.findings else ()
    groups = studied.groups if FINAL in (column.name for column in columns) else {}
    several = {
        (task, name): {run.spec.seed: run for run in runs}
        for task, series in groups.items()
        for name, runs in series.items()
        if max(map(len, series.values())) > 1
    }
    seeds = sorted({seed for own in several.values() for seed in own})
    rows = [
        [task_name(task), algorithm_name(name), *(_final(own.get(seed)) for seed in seeds)]
        for (task, name), own in several.items()
    ]
    headers = ["final test accuracy", "", *(f"seed {seed}" for seed in seeds)]
    return table(headers, rows, words=2) if rows else ""


def _final(run: Outcome | None) -> str:
    return text_of(final([run], "test_accuracy"), "%") if run else ""
