"""The generated blocks of docs/algorithms.md and of the page of every algorithm.

A page is written by hand around three blocks: `options` has every option of `fedexp algorithms`
with its default and the first sentence of its documentation in the source; `state` the tensors that
clients and server send and store; `results` the rows of the leaderboard. `docs/algorithms.md` has
the chooser and the table of all pages, whose summaries are the first paragraphs of the pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedexp.algorithms import ALGORITHMS, Algorithm, fedavg
from fedexp.client import zero_extras
from fedexp.errors import UsageError
from fedexp.local import LocalTraining
from fedexp.options import Setup
from fedexp.text import option_text
from tools.algorithm_pages.chooser import CHOICES
from tools.leaderboard.measures import Board, Cell
from tools.leaderboard.protocol import ENTRIES, LAST, SEEDS, TASKS, BoardTask, Entry
from tools.leaderboard.report import filled, final_text, rounds_text
from tools.results.format import NO_RUNS, paragraphs, percent, table, table_of_filled

FOLDER = Path("docs/algorithms")
DELTA = "delta-sgd"  # a local optimiser, which has a page like the algorithms
PAGES = (*ALGORITHMS, DELTA)
SECTIONS = (
    "Formula",
    "Paper",
    "Use",
    "Options",
    "State and bytes",
    "When to use it",
    "Released code",
    "Results",
)
PRINTED = "fedexp-printed"
# Rows to compare with; the last where FedExP has no runs.
REFERENCES = ("fedavg", "fedexp", PRINTED)
DELTA_OPTIONS = ("local.optimizer", "local.lr", "local.delta_gamma", "local.delta_growth")
EVERYWHERE = ("bound", "server_schedule")  # options of every algorithm: docs/algorithms.md
SIZE = 1000  # of the model whose tensors are counted
EVIDENCE = 2  # tasks beside a choice


def page_path(name: str) -> Path:
    """Return the path of a page, relative to the repository."""
    return FOLDER / f"{name}.md"


def read_pages(root: Path) -> dict[str, str]:
    """Return the text of every page by name; raise `UsageError` for one that is missing."""
    for name in PAGES:
        if not (root / page_path(name)).is_file():
            raise UsageError(
                f"{page_path(name)} is missing; write it with the sections {', '.join(SECTIONS)}"
            )
    return {name: (root / page_path(name)).read_text(encoding="utf-8") for name in PAGES}


def page_blocks(name: str, board: Board) -> dict[str, str]:
    """Return the generated blocks of a page."""
    return {"options": options(name), "state": state(name), "results": results(name, board)}


def overview_blocks(pages: Mapping[str, str], board: Board) -> dict[str, str]:
    """Return the generated blocks of docs/algorithms.md, from the texts of the pages."""
    return {"chooser": chooser(pages, board), "algorithm-pages": all_pages(pages, board)}


def title(text: str) -> str:
    """Return the title of a page."""
    return text.partition("\n")[0].removeprefix("# ")


def summary(text: str) -> str:
    """Return the first paragraph of a page in one line.

    >>> summary("# FedAvg\\n\\nAverages\\nmodels.\\n\\n## Formula")
    'Averages models.'
    """
    return " ".join(text.split("\n\n")[1].split())


def own_rows(name: str) -> list[Entry]:
    """Return the rows of the leaderboard that belong to a page."""
    if name == DELTA:
        return [ENTRIES[DELTA]]
    return [each for each in ENTRIES.values() if each.algorithm == name and each.name != DELTA]


# Options


def options(name: str) -> str:
    """Return the table of options: name, default, meaning."""
    local = LocalTraining(optimizer="delta-sgd") if name == DELTA else LocalTraining()
    setup = Setup(_algorithm(name), local)
    rows = []
    for key, value in setup.all_options().items():
        section, _, field = key.rpartition(".")
        is_shown = section != "local" and key not in EVERYWHERE
        if name == DELTA:
            is_shown = key in DELTA_OPTIONS
        if not is_shown:
            continue
        owner = setup.section(section) if section else setup.algorithm
        rows.append([f"`{key}`", f"`{option_text(value)}`", meaning(type(owner), field)])
    return table(["option", "default", "meaning"], rows, left=3)


WEIGHTING = (
    "`uniform`, or `size` for weights by the number of examples; the same in the mean and in the "
    "mean squared norm"
)


def meaning(owner: type, field: str) -> str:
    """Return the first sentence that the docstrings of a class have on a field, as Markdown.

    >>> from fedexp.server import ExP
    >>> meaning(ExP, "max_step")
    'upper bound of η_g'
    """
    if field == "weighting":
        return WEIGHTING
    for base in owner.__mro__:
        found = re.search(
            rf"^    {field}: (.*?)(?=^    \w+: |^\S|\Z)",
            inspect.cleandoc(vars(base).get("__doc__") or "").partition("Args:")[2],
            re.MULTILINE | re.DOTALL,
        )
        if found:
            return _markdown(" ".join(found[1].split()))
    raise UsageError(f"{owner.__name__} does not document {field}; add it to Args of its docstring")


def _markdown(text: str) -> str:
    """Return the first sentence, with links for citations and no pipes, which end a cell."""
    first = re.split(r"(?<!et al)(?<!e\.g)\. (?=\W?[A-Z\"`])", text, maxsplit=1)[0].rstrip(".")
    linked = re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", r"[\1](../\1\2)", first)
    return linked.replace("||", "‖")


# What is sent and stored


def state(name: str) -> str:
    """Return what clients and server send and store, as multiples of the model's d parameters."""
    algorithm = _algorithm(name)
    rule, params = algorithm.client, torch.zeros(SIZE)
    broadcast, own = rule.init_broadcast(params), rule.init_client_state(params)
    server = {**algorithm.server.init(params), **broadcast}
    iterates = {f"iterate {k}": params for k in range(1, algorithm.iterates)}
    rows = [
        ["a client sends", *_counted({"update": params, **zero_extras(rule, params)})],
        ["a client receives", *_counted({"model": params, **broadcast})],
        ["a client stores between rounds", *_counted(own)],
        ["the server stores", *_counted({"model": params, **iterates, **server})],
    ]
    return table(["", "numbers", "which"], rows, left=3)


def _counted(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the number of values, as a multiple of d plus single numbers, and their names."""
    vectors = sum(each.numel() == SIZE for each in tensors.values())
    single = sum(each.numel() for each in tensors.values() if each.numel() != SIZE)
    parts = [f"{vectors if vectors > 1 else ''} d".strip()] * bool(vectors)
    parts += [str(single)] * bool(single)
    names = ["previous iterate" if each.startswith("iterate") else each for each in tensors]
    known = [each if " " in each or each in ("model", "update") else f"`{each}`" for each in names]
    return [" + ".join(parts) or "0", ", ".join(known) or "nothing"]


def _algorithm(name: str) -> Algorithm:
    return fedavg() if name == DELTA else ALGORITHMS[name]()


# Results


def results(name: str, board: Board) -> str:
    """Return one table per task, an algorithm beside FedAvg and FedExP, and its figure."""
    own = own_rows(name)
    filled = filled_tasks(name, board)
    if not filled:
        return NO_RUNS
    parts = []
    for task in filled:
        cells = [board[task, row] for row in shown_rows(name, task, board)]
        parts += [f"### {TASKS[task].title}", _results(TASKS[task], cells)]
    missing = [TASKS[task].title for task in TASKS if task in own[0].centres and task not in filled]
    titles = " and ".join(entry.title for entry in own)
    return paragraphs(
        *parts,
        f"Not run yet: {'; '.join(missing)}." if missing else "",
        f"![Test accuracy by round of {titles}]({name}.svg)",
        f"*Test accuracy by round, mean of the last {LAST} evaluations and over seeds. Horizontal "
        "lines: the two targets of the task.*",
    )


def filled_tasks(name: str, board: Board) -> list[str]:
    """Return the tasks on which a row of the page has runs."""
    own = own_rows(name)
    return [task for task in TASKS if any((task, entry.name) in board for entry in own)]


def shown_rows(name: str, task: str, board: Board) -> list[str]:
    """Return the rows of a task that a page shows: its own first, then those to compare with."""
    own = [entry.name for entry in own_rows(name)]
    compared = REFERENCES[:2] if (task, "fedexp") in board else REFERENCES
    return [row for row in dict.fromkeys([*own, *compared]) if (task, row) in board]


def _results(task: BoardTask, cells: Sequence[Cell]) -> str:
    """Return the table of a task, without the worst decile where no entry has it."""
    headers = ["algorithm", "tuned hyperparameters" if task.tuned else "hyperparameters, not tuned"]
    headers += [f"rounds to {percent(target)}" for target in task.targets]
    headers += ["final", "worst decile", "seeds"]
    return table_of_filled(headers, [_result(cell) for cell in cells], left=2)


def _result(cell: Cell) -> list[str]:
    edges = cell.edges()
    stars = {name: "\\*" if name in edges else "" for name in cell.point}
    values = [f"`{name}={value:.3g}`{stars[name]}" for name, value in cell.point.items()]
    return [
        cell.entry.title,
        " ".join(values),
        rounds_text(cell, 0),
        rounds_text(cell, 1),
        final_text(cell),
        "" if cell.worst is None else f"{100 * cell.worst:.1f} %",
        str(len(cell.runs)),
    ]


# The overview


def chooser(pages: Mapping[str, str], board: Board) -> str:
    """Return the table of situations, with the rounds of the rows that back each choice."""
    rows = []
    for choice in CHOICES:
        links = ", ".join(f"[{title(pages[name])}](algorithms/{name}.md)" for name in choice.take)
        note = f"{links} {choice.note}".strip()
        rows.append([choice.situation, note, choice.reason, _evidence(choice.rows, board)])
    headers = ["situation", "take", "because; not when", "measured: rounds to the upper target"]
    return table(headers, rows, left=4)


def _evidence(rows: Sequence[str], board: Board) -> str:
    """Return the rounds of rows on the first tasks where at least two of them have runs.

    The table of all pages has the other tasks.
    """
    parts = []
    for name, task in TASKS.items():
        cells = [board.get((name, row)) for row in rows]
        known = [cell for cell in cells if cell is not None]
        if len(known) > 1:
            shown = [f"{_short(cell.entry)} {_rounds(cell)}" for cell in known]
            parts.append(f"{_short(task)}: {' · '.join(shown)}")
    return "<br>".join(parts[:EVIDENCE])


def _short(named: Entry | BoardTask) -> str:
    """Return a title without its remark, except where the row has a namesake.

    >>> _short(ENTRIES["fedexp"]), _short(ENTRIES["fedexp-printed"]), _short(TASKS["emnist"])
    ('FedExP', 'FedExP, printed', 'EMNIST')
    """
    return named.title if named.name == PRINTED else re.split(r", | \(", named.title)[0]


def all_pages(pages: Mapping[str, str], board: Board) -> str:
    """Return the table of all algorithms: link, summary, bytes, and rounds by task."""
    tasks = filled(board)
    rows = []
    for name, text in pages.items():
        sent, stored = (state(name).splitlines()[at].split("|")[2].strip() for at in (2, 4))
        own = {entry.name: entry.title for entry in own_rows(name)} or {name: title(text)}
        for at, (row, its_title) in enumerate(own.items()):
            cells = [board.get((task, row)) for task in tasks]
            rounds = ["" if cell is None else _rounds(cell) for cell in cells]
            shown = its_title if len(own) > 1 else title(text)
            link = f"[{shown}](algorithms/{name}.md) `{name}`"
            about = "" if at else summary(text)
            rows.append([link, about, sent, stored, *rounds])
    headers = ["algorithm", "in one sentence", "client sends", "stores"]
    measured = [f"{_short(TASKS[task])}: {percent(TASKS[task].targets[1])}" for task in tasks]
    return table([*headers, *measured], rows, left=2)


def _rounds(cell: Cell) -> str:
    """Return the smoothed crossing of the upper target, with its seeds where some are missing."""
    rounds = cell.rounds(1)
    found = len(cell.crossings(1))
    seeds = "1 seed" if len(cell.runs) == 1 else f"{len(cell.runs)} seeds"
    if rounds is None:
        return f"{found} of {seeds}"
    return f"{rounds:.0f}" if len(cell.runs) == len(SEEDS) else f"{rounds:.0f}, {seeds}"
