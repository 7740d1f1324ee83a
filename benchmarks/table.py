"""One table of all recorded times, and the performance figures of the documents.

    python benchmarks/table.py            # print the table
    python benchmarks/table.py --write    # and write it, and the figures of the docs

Every row is the newest record of a piece of work on a device, in `records/*.json`: rounds on a GPU
(`gpu_rounds.py`, `gpu_long.py`), start-up (`startup.py`), comparisons (`comparison.py`), peers
(`peers.py`) and training paths (`engines.py`). Records of memory, ratios and cost models
(`clients.py`, `million.py`, `ranks.py`, `scaling.py`, `many_gpus.py`, `synthetic.py`) and those
before 2026-11-16 that have no engine are not in it. The pages of docs/coming-from have the rows of
their package, and the accuracies of `coming_from.py`. A test compares documents and records.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.tables import markdown_table, text_table
from fedexp.engine.contract import probe
from fedexp.engine.state import SimulationState
from fedexp.objective import Buffers

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE / "README.md"
COMING_FROM = HERE.parent / "docs" / "coming-from"
# By page: the package in records of accuracy, and in those of time if it is timed.
PAGES = {"flower": ("Flower", "Flower simulation"), "pfl-research": ("pfl", "pfl")}
PAGES |= {"fedjax": ("FedJAX", ""), "pfllib": ("PFLlib", ""), "fluke": ("fluke", "fluke")}
COSTS = HERE.parent / "docs" / "how-to" / "costs.md"
WORKS = {"W1": "W1, small MLP, FedAvg", "W2": "W2, pfl's benchmark, FedAvg"}
WORKS["W3"] = "W3, ResNet-18, FedAvg"
WHICH = {
    WORKS["W1"]: "MLP 64-64-10 on 100 clients of 100 examples, 20 of them per round with 20 local "
    "steps on batches of 50",
    WORKS["W2"]: "pfl-research's published benchmark, a CNN on 1,000 clients of 50 images, 50 of "
    "them per round for one epoch in batches of 10",
    WORKS["W3"]: "the paper's ResNet-18, 20 clients per round with 20 local steps on batches of 50",
}
# In records up to this date other packages have one turn; two turns of one engine differ by up to
# this factor there.
NO_RANGES, LEVEL = "2026-11-15", 1.6
HEAD = ["work", "device", "ms (min-max)", "turns", "compared with", "its ms", "its ms / ours"]
HEAD += ["date", "hardware", "record"]


@dataclass(frozen=True)
class Measured:
    """A time of this package, and one to compare it with.

    Attributes:
        kind: "round", "run", "start-up", "comparison", "peer" or "path".
        work: what was timed.
        device: e.g. "H200" or "2 cores".
        ms: median, in milliseconds.
        low: the fastest turn.
        high: the slowest turn.
        turns: their number.
        other: what it is compared with, or "".
        other_ms: its time, or None.
        date: of the measurement.
        hardware: processor or GPU, and versions.
        record: name of the file.
        other_turns: turns of the other, or 0 where the record does not state them.
        versions: of the other's packages.
        engine: the engine that ran, where the record has it.
    """

    kind: str
    work: str
    device: str
    ms: float
    low: float
    high: float
    turns: int
    other: str
    other_ms: float | None
    date: str
    hardware: str
    record: str
    other_turns: int = 0
    versions: str = ""
    engine: str = ""

    @property
    def ratio(self) -> float | None:
        """The other's time over ours: above 1 where this package is faster."""
        return None if self.other_ms is None else self.other_ms / self.ms

    def ratios(self) -> str:
        """Return the ratio over the slowest and the fastest of our turns, and what it is worth."""
        assert self.other_ms is not None
        ends = dict.fromkeys(f"{self.other_ms / ms:.2g}" for ms in (self.high, self.low))
        level = self.other_ms / self.high < LEVEL and self.date <= NO_RANGES
        return " to ".join(ends) + (", not a result" if level else "")

    def cells(self) -> list[str]:
        """Return the row of the table."""
        spread = f" ({short(self.low)}-{short(self.high)})" if self.turns > 1 else ""
        other = "-" if self.other_ms is None else short(self.other_ms)
        ratio = "-" if self.ratio is None else f"{self.ratio:.3g}"
        ours = [self.work, self.device, short(self.ms) + spread, str(self.turns)]
        return [*ours, self.other or "-", other, ratio, self.date, self.hardware, self.record]


def short(ms: float) -> str:
    """Return milliseconds with three digits, and no fewer than those before the point.

    >>> short(17.914), short(234.138), short(179490)
    ('17.9', '234', '179,490')
    """
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def measurements(folder: Path = HERE / "records") -> list[Measured]:
    """Return the newest measurement of each piece of work, by kind."""
    newest: dict[tuple[str, ...], Measured] = {}
    for path in sorted(folder.glob("*.json")):  # the names begin with the date
        record = json.loads(path.read_text())
        if "superseded_by" in record:  # by another one of the same day
            continue
        for kind, read in READERS.items():
            if "long" in record if kind == "run" else path.stem.endswith(SUFFIXES[kind]):
                for one in read(record, path.name):
                    newest[kind, one.device, one.work, one.other] = one
    order = list(READERS)
    return sorted(newest.values(), key=lambda one: (order.index(one.kind), one.device))


def _measured(
    record: dict[str, Any],
    name: str,
    kind: str,
    work: str,
    row: dict[str, Any],
    other: str = "",
    other_ms: float | None = None,
) -> Measured:
    """Return the measurement of a row that has a median and, in newer records, its range."""
    taken = row["turns"] if isinstance(row.get("turns"), list) else [row["ms"]]
    low, high = row.get("ms_min", min(taken)), row.get("ms_max", max(taken))
    turns = row["turns"] if isinstance(row.get("turns"), int) else len(taken)
    full = record.get("hardware") or f"{record['device']}, torch {record['torch']}"
    hardware = re.sub(r", load [\d.]+", "", full)
    cores = re.search(r"\d+ cores", full)
    device = "H200" if "H200" in full else cores.group() if cores else full.split(",")[0]
    return Measured(
        kind, work, device, row["ms"], low, high, turns, other, other_ms, record["date"],
        hardware, name, engine=row.get("engine", ""),
    )  # fmt: skip


def _rounds(record: dict[str, Any], name: str) -> Iterator[Measured]:
    for row in record["rows"]:
        if "engine" in row and row["variant"] not in ("eager", "loop"):
            rule = "" if row["algorithm"] == "fedexp" else f", {row['algorithm']}"
            work = f"round, {row['work']}, {row['precision']}{rule}"
            yield _measured(record, name, "round", work, row)


def _long(record: dict[str, Any], name: str) -> Iterator[Measured]:
    rounds = record["long"]["rounds"]
    row = {"ms": 1e3 * record["long"]["seconds_at"][str(rounds)]}
    yield _measured(record, name, "run", f"{rounds} rounds of ResNet-18 with evaluations", row)


def _startup(record: dict[str, Any], name: str) -> Iterator[Measured]:
    torch_ms = next(row["ms"] for row in record["rows"] if row["work"] == "import torch")
    bytecode = "" if record.get("bytecode", True) else ", no bytecode"
    for row in record["rows"]:
        work = row["work"] + bytecode
        if row["caches"]:
            work = f"first record, {work}, {row['caches']} caches, beyond import torch"
            yield _measured(record, name, "start-up", work, row)
        elif row["work"] == "import fedexp":
            yield _measured(record, name, "start-up", work, row, "import torch", torch_ms)
        elif row["work"] != "import torch":
            yield _measured(record, name, "start-up", work, row)


def _comparison(record: dict[str, Any], name: str) -> Iterator[Measured]:
    for row in record["rows"]:
        other = f"{row['runs']} times one `fedexp run`"
        yield _measured(record, name, "comparison", row["work"], row, other, row["separate_ms"])


def _peers(record: dict[str, Any], name: str) -> Iterator[Measured]:
    timed = [row for row in record["rows"] if "ms" in row]
    for work in dict.fromkeys(row["work"] for row in timed):
        rows = [row for row in timed if row["work"] == work]
        ours = min((r for r in rows if "auto" in r.get("requested", "")), key=_ms, default=None)
        if ours is None:
            continue
        for peer in dict.fromkeys(r["contestant"] for r in rows):
            if not peer.startswith("fedexp"):
                best = min((r for r in rows if r["contestant"] == peer), key=_ms)
                versions = ", ".join(f"{k} {v}" for k, v in best.get("versions", {}).items())
                one = _measured(record, name, "peer", WORKS[work], ours, peer, best["ms"])
                yield replace(one, other_turns=len(best["turns"]), versions=versions)


def _paths(record: dict[str, Any], name: str) -> Iterator[Measured]:
    rows = record["rows"]
    for row in rows:
        if "simpler" not in row:
            continue
        same = [r for r in rows if r["case"] == row["case"] and r["path"] == row["simpler"]]
        work = f"round, {row['case']}, path {row['path']}"
        other = f"path {row['simpler']}"
        yield _measured(record, name, "path", work, row, other, same[-1]["ms"] if same else None)


def _ms(row: dict[str, Any]) -> float:
    return float(row["ms"])


READERS: dict[str, Callable[[dict[str, Any], str], Iterator[Measured]]] = {
    "round": _rounds,
    "run": _long,
    "start-up": _startup,
    "comparison": _comparison,
    "peer": _peers,
    "path": _paths,
}
SUFFIXES = {"round": "rounds", "start-up": "startup", "comparison": "comparison"}
SUFFIXES |= {"peer": "peers", "path": "engines"}


def table(rows: list[Measured], render: Callable[..., str] = text_table) -> str:
    """Return all measurements; times are milliseconds."""
    return render(HEAD, [row.cells() for row in rows])


def peer_times(rows: list[Measured], peer: str) -> str:
    """Return the sentences of a peer's page: its times beside ours."""
    lines, sources = list[str](), list[str]()
    for row in (row for row in rows if row.kind == "peer" and row.other == peer):
        turns = f"{row.turns} turns: {short(row.low)} to {short(row.high)}"
        ours = f"{short(row.ms)} ms per round ({turns if row.turns > 1 else '1 turn'})"
        theirs = f"{short(row.other_ms or 0)} ms ({_turns(row.other_turns)})"
        ratio = row.ratios().replace(", not", " times as long, which is not")
        lines.append(
            f"- {WHICH[row.work]}: this package {ours}, {peer} {theirs}: "
            f"{ratio if 'times' in ratio else f'{ratio} times as long'}."
        )
        sources.append(f"{row.hardware}; {peer} with {row.versions}. Record: `{row.record}`.")
    first = "FedAvg in the best configuration of each:\n"
    return "\n".join([first, *lines, "", *dict.fromkeys(sources)])


def _turns(number: int) -> str:
    return "1 turn" if number == 1 else f"{number} turns"


def accuracies(package: str, folder: Path = HERE / "records") -> str:
    """Return the sentence of a peer's page: the accuracies of its FedAvg and of ours."""
    path = max(folder.glob("*-coming-from.json"))  # the names begin with the date
    record = json.loads(path.read_text())

    def percents(name: str, algorithm: str = "fedavg") -> list[float]:
        for row in record["rows"]:
            if (row["package"], row["algorithm"]) == (name, algorithm):
                return [100 * value for value in row["accuracies"]]
        raise ValueError(f"{path.name} has no {algorithm} by {name}; run benchmarks/coming_from.py")

    def spread(values: list[float]) -> str:
        percent = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} %"
        return f"{percent} ({len(values)} seeds)"

    theirs, ours, exp = percents(package), percents("FedExP"), percents("FedExP", "fedexp")
    apart = abs(statistics.mean(theirs) - statistics.mean(ours))
    return (
        f"Test accuracy after {record['rounds']} rounds, mean ± standard deviation: {package} "
        f"{spread(theirs)}, this package\n{spread(ours)}, {apart:.1f} points apart; {spread(exp)} "
        f'with `"fedexp"` in place of `"fedavg"`.\nThe same seed draws other cohorts and batches '
        f"in each package. Record: `{path.name}`."
    )


def round_times(rows: list[Measured]) -> str:
    """Return the times of rounds: on a GPU by precision, on a CPU those of the fastest engine."""
    best: dict[tuple[str, str], Measured] = {}
    for row in rows:
        if row.kind == "path" and row.device.endswith("cores"):
            key = row.device, row.work.partition(", path ")[0]
            best[key] = min(best.get(key, row), row, key=lambda one: one.ms)
    found = [row for row in rows if row.kind == "round"]
    found += sorted(best.values(), key=lambda row: (row.device, row.ms))
    head = ["round of", "device", "ms per round (min-max)", "engine"]
    cells = []
    for row in found:
        work, _, path = row.work.removeprefix("round, ").partition(", path ")
        cells.append([work, row.device, row.cells()[2], row.engine or path])
    records = ", ".join(dict.fromkeys(f"`{row.record}`" for row in found))
    return f"{markdown_table(head, cells)}\n\nFrom {records}."


def all_peer_times(rows: list[Measured]) -> str:
    """Return the times of other frameworks for the same work."""
    head = ["work", "device", "this package, ms per round", "compared with", "its ms", "ratio"]
    found = [(row, row.cells()) for row in rows if row.kind == "peer"]
    cells = [[*cells[:3], *cells[4:6], row.ratios()] for row, cells in found]
    records = ", ".join(dict.fromkeys(f"`{row.record}`" for row, _ in found))
    return f"{markdown_table(head, cells)}\n\nFrom {records}."


def message_sizes(parameters: int = 10**6) -> str:
    """Return what algorithms send and store, in multiples of the model's size.

    Args:
        parameters: size of the model for which this is computed, in float32 and without buffers.
    """
    params = torch.zeros(parameters)
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, build in ALGORITHMS.items():
        algorithm = build()
        state = SimulationState.of(params, Buffers.none(), algorithm)
        client_state, up, down = probe(algorithm, state)
        own = sum(v.nbytes for v in client_state.values())
        server = sum(v.nbytes for each in (state.server, state.broadcast) for v in each.values())
        sizes = (up, down, own, algorithm.iterates * params.nbytes + server)
        groups.setdefault(tuple(_models(size, params.nbytes) for size in sizes), []).append(name)
    head = [
        "algorithm",
        "a client sends",
        "a client receives",
        "a client stores",
        "the server stores",
    ]
    return markdown_table(head, [[", ".join(f"`{n}`" for n in g), *c] for c, g in groups.items()])


def _models(size: int, model: int) -> str:
    """Return a size in models; up to 100 bytes more are given as such.

    >>> _models(4016, 4000), _models(0, 4000), _models(8, 4000)
    ('1 model + 16 bytes', '-', '8 bytes')
    """
    whole, rest = divmod(size, model)
    assert rest <= 100
    parts = [f"{whole} model{'s' if whole > 1 else ''}"] if whole else []
    return " + ".join([*parts, *([f"{rest} bytes"] if rest else [])]) or "-"


def with_block(text: str, name: str, block: str) -> str:
    """Return a document with new contents between the comments `begin` and `end` of a name.

    >>> with_block("<!-- begin benchmark a -->\\nold\\n<!-- end benchmark a -->", "a", "new")
    '<!-- begin benchmark a -->\\nnew\\n<!-- end benchmark a -->'
    """
    begin, end = f"<!-- begin benchmark {name} -->\n", f"\n<!-- end benchmark {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the document has no block {name!r}; add the comments around it")
    return f"{before}{begin}{block}{end}{after}"


def documents(rows: list[Measured]) -> dict[Path, str]:
    """Return the documents with figures of these rows."""
    costs = COSTS.read_text()
    blocks = {
        "rounds": round_times(rows),
        "peers": all_peer_times(rows),
        "messages": message_sizes(),
    }
    for name, block in blocks.items():
        costs = with_block(costs, name, block)
    texts = {
        BENCHMARKS: with_block(BENCHMARKS.read_text(), "table", table(rows, markdown_table)),
        COSTS: costs,
    }
    for page, (package, peer) in PAGES.items():
        path = COMING_FROM / f"{page}.md"
        text = with_block(path.read_text(), "accuracy", accuracies(package))
        texts[path] = with_block(text, "speed", peer_times(rows, peer)) if peer else text
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the figures of the documents")
    args = parser.parse_args()
    rows = measurements()
    print(table(rows))
    if args.write:
        for path, text in documents(rows).items():
            path.write_text(text)


if __name__ == "__main__":
    main()
