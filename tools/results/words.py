"""Names, numbers and small tables as the document writes them."""

from __future__ import annotations

from collections.abc import Sequence

from fedexp.analysis.summary import rounds_to
from fedexp.analysis.tables import markdown_table
from fedexp.runs.spec import Outcome

TASKS = {
    "synthetic": "synthetic regression",
    "emnist": "EMNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "cifar10-cnn": "CIFAR-10 with a CNN",
}
ALGORITHMS = {
    "fedexp": "FedExP",
    "fedavg": "FedAvg",
    "scaffold": "SCAFFOLD",
    "fedadagrad": "FedAdagrad",
    "fedprox": "FedProx",
    "scaffold-exp": "SCAFFOLD-ExP",
    "fedexp-m": "FedExP-M",
    "fedadam": "FedAdam",
    "fedavgm": "FedAvg-M",
}


def task_name(task: str) -> str:
    return TASKS.get(task, task)


def algorithm_name(series: str) -> str:
    """The paper's spelling; what is added to it stays, and a setting keeps its own.

    >>> algorithm_name("fedexp, last iterate"), algorithm_name("10^-3")
    ('FedExP, last iterate', '10^-3')
    """
    name, comma, more = series.partition(", ")
    return f"{ALGORITHMS.get(name, name)}{comma}{more}"


def percent(share: float) -> str:
    """A target as text.

    >>> percent(0.72)
    '72 %'
    """
    return f"{100 * share:g} %"


def plural(number: int, what: str) -> str:
    """`1 run`, `1,200 runs`."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def named(line: str) -> str:
    """A line that begins with a task, with the task's name.

    >>> named("cifar10: 2 seeds instead of 5")
    'CIFAR-10: 2 seeds instead of 5'
    """
    task, colon, rest = line.partition(": ")
    return f"{task_name(task)}{colon}{rest}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table in Markdown; the first `words` columns are words and stand to the left."""
    head, _, *body = markdown_table(headers, rows).splitlines()
    rule = [*(["---"] * words), *(["---:"] * (len(headers) - words))]
    return "\n".join([head, f"| {' | '.join(rule)} |", *body])


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def paragraphs(*parts: str) -> str:
    """Parts with an empty line between; empty ones are left out."""
    return "\n\n".join(part for part in parts if part)


def hits(runs: Sequence[Outcome], target: float) -> str:
    """The first round at the target, seed by seed."""
    return ", ".join(_hit(run, target) for run in runs)


def _hit(run: Outcome, target: float) -> str:
    hit = rounds_to(run.curve("test_accuracy"), target, higher=True)
    if hit is not None:
        return str(hit)
    return "diverged" if run.diverged_at is not None else f">{len(run.rows)}"
