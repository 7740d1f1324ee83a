"""Names, numbers, tables and lists as the documents write them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fedexp.analysis.tables import markdown_table

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
NO_RUNS = "No runs yet."
PRINTED = "eps as printed"  # the first reading of eps, beside `READINGS`


@cache
def repository() -> str:
    """Return the address of the source, which the package's metadata has."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return project["urls"]["Source"]


def link(text: str, path: str) -> str:
    """Return a link from README to a file; absolute, since a package index shows README as well.

    >>> link("results", "docs/reproduction.md").startswith("[results](https://")
    True
    """
    return f"[{text}]({repository()}/blob/main/{path})"


def task_name(task: str) -> str:
    return TASKS.get(task, task)


def algorithm_name(series: str) -> str:
    """Return a series with its algorithm in the paper's spelling.

    >>> algorithm_name("fedexp, last iterate"), algorithm_name("fedexp (participants x eps)")
    ('FedExP, last iterate', 'FedExP (participants x eps)')
    """
    name = re.split(r", | \(", series, maxsplit=1)[0]
    return f"{ALGORITHMS.get(name, name)}{series.removeprefix(name)}"


def algorithm_names(line: str) -> str:
    """Return a line with the algorithms that it names in the paper's spelling.

    >>> algorithm_names("fedexp (participants x eps), fedavg not run")
    'FedExP (participants x eps), FedAvg not run'
    """
    known = "|".join(sorted(ALGORITHMS, key=len, reverse=True))
    return re.sub(rf"(?<![\w-])(?:{known})(?![\w-])", lambda m: ALGORITHMS[m.group()], line)


def with_task_name(line: str) -> str:
    """Return a line that starts with a task, with the task's name.

    >>> with_task_name("cifar10: 2 seeds instead of 5")
    'CIFAR-10: 2 seeds instead of 5'
    """
    task, colon, rest = line.partition(": ")
    return f"{task_name(task)}{colon}{rest}"


def percent(fraction: float) -> str:
    """Format a target.

    >>> percent(0.72)
    '72 %'
    """
    return f"{100 * fraction:g} %"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table in Markdown whose first `left` columns are aligned left, the others right.

    A percent sign in a header is not parted from its number.
    """
    whole = [header.replace(" %", "\u00a0%") for header in headers]
    head, _, *body = markdown_table(whole, rows).splitlines()
    rule = [*(["---"] * left), *(["---:"] * (len(headers) - left))]
    return "\n".join([head, f"| {' | '.join(rule)} |", *body])


def table_of_filled(headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a table without the columns that no row has."""
    filled = [at for at in range(len(headers)) if any(row[at] for row in rows)]
    return table([headers[k] for k in filled], [[row[k] for k in filled] for row in rows], left)


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def paragraphs(*parts: str) -> str:
    """Join the parts that are not empty, with an empty line between them."""
    return "\n\n".join(part for part in parts if part)
