"""A run on Flower in a folder, with the same files as a simulated run has.

`open_run` opens the folder of the strategy's `checkpoint` argument, restores the run that is stored
in it, and yields the `Journal` that stores every further round. The rows of `records.jsonl` have
the columns of a simulated run and Flower's records, from which `restored_result` rebuilds Flower's
`Result`; `spec.toml` has everything that decides the numbers of the run.
"""

from __future__ import annotations

import hashlib
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr
import tomli_w
import torch
from flwr.app import ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result
from flwr.supercore import log

from fedexp.engine import SimulationState
from fedexp.errors import DivergedError, UsageError, remedies, require, shown
from fedexp.experiment import Row
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.privacy import open_ledger
from fedexp.flower.server import FederatedRun
from fedexp.runs import is_run, load_run, read_spec
from fedexp.runs.fingerprint import fingerprint_of_rules
from fedexp.runs.folder import RELEASES, BusyError, RunFolder, machine
from fedexp.runs.journal import Journal
from fedexp.runs.records import RECORDS
from fedexp.storage import to_bytes

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy, Settings

SCORES = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
SYNONYMS = {"accuracy": "test_accuracy", "acc": "test_accuracy", "loss": "test_loss"}
RESULT_FIELDS = {
    "trained": "train_metrics_clientapp",
    "evaluated": "evaluate_metrics_clientapp",
    "central": "evaluate_metrics_serverapp",
}
RESERVED = {
    "round",
    "local_lr",
    "accepted",
    *("largest_share", "undone", "back_to", "setbacks", "changed"),
    "initial",
    "config",
    "initial_config",
    "layout",
    *RESULT_FIELDS,
}
HEAD = "# A run of fedexp on Flower, frozen. Start it again with checkpoint=THIS-FOLDER\n"
LOCK_TIMEOUT = 30.0  # seconds; the ServerApp of a killed SuperLink may hold the lock for a while
RESUMED_DIVERGED = "%s diverged at round %s (%s); resuming from its last good state, of round %d"
FINISHED = "%s holds a finished run; nothing is left to do"
NO_EFFECT = "the run is finished, so %s has no effect; raise num_rounds to continue it"
CPU = torch.device("cpu")
# What may change when a run is resumed, among it what the remedies of errors name.
ACCOUNTED = ("rounds", "options.fraction_train", "options.min_train_nodes", "options.bound")
MAY_CHANGE = (
    *ACCOUNTED,
    *("options.max_norm", "options.max_step", "options.lr", "options.min_replies"),
    "options.train_config",
)
REMEDIES = {
    "damaged": "restore it, or remove the folder to start over",
    "content": "remove the folder to run it again",
    "lock": "choose a folder on another disk, or leave checkpoint out",
}


@contextmanager
def open_run(
    strategy: RuleStrategy, run: FederatedRun, config: ConfigRecord
) -> Iterator[tuple[Journal, bool]]:
    """Open the run folder of a strategy, and restore the run to its last complete round.

    Yields the journal of the run and whether the run is complete. Without a folder, or without a
    round to store, the journal is in memory only.
    """
    if run.settings.checkpoint is None or not run.rounds:
        yield Journal(None, 0.0, CPU), False
        return
    path = Path(run.settings.checkpoint).expanduser().absolute()
    log(INFO, "the run is stored in %s", path)
    with remedies(REMEDIES):
        if is_run(path):
            run.study = str(read_spec(path).get("study", run.study))
        spec = run_spec(strategy, run, config)
        about = {**machine(), "flwr": flwr.__version__, "metric": "test_accuracy", "target": None}
        with ExitStack() as stack:
            content = fingerprint_of_rules(run.settings.algorithm)
            folder = RunFolder(path, spec, about, HEAD, content, may_change=_may_change(run))
            diverged = _reopen(_locked(stack, folder))
            journal = Journal(folder, 0.0, CPU)
            stack.callback(journal.close)
            if diverged is not None:
                log(WARNING, RESUMED_DIVERGED, path, *diverged, journal.resumed_from)
            yield journal, _restored(folder, journal, run)


def conclude(run: FederatedRun, journal: Journal, error: DivergedError | None = None) -> None:
    """Store the output model and how the run ended."""
    if journal.folder is not None:
        arrays = ndarrays(run.output())
        named = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
        journal.conclude("diverged" if error else "finished", to_bytes(named), error)


def _locked(stack: ExitStack, folder: RunFolder) -> RunFolder:
    """Enter the folder; wait for another process that holds its lock."""
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return stack.enter_context(folder)
        except BusyError:
            if time.monotonic() >= end:
                raise
            time.sleep(min(1.0, LOCK_TIMEOUT))


def _may_change(run: FederatedRun) -> list[str]:
    """Return the names of the spec that may change when the run is resumed.

    Not what the privacy accounting depends on, and not an option that only starts the state of the
    server rule (FedHyper's lr).
    """
    fixed = {f"options.{name}" for name in run.state.server}
    fixed |= set(ACCOUNTED) if run.settings.privacy is not None else set()
    return [name for name in MAY_CHANGE if name not in fixed]


def _reopen(folder: RunFolder) -> tuple[int, str] | None:
    """Reopen a run that diverged, or that has more rounds now.

    Returns the round and the reason of one that diverged, None for any other run.
    """
    stored = load_run(folder.path)
    rounds, result = len(stored.rows), stored.result
    require(
        rounds <= folder.spec["rounds"],
        f"{folder.path} has {rounds} rounds already; set num_rounds to {rounds} or more, or choose "
        "another folder",
    )
    if result is None or folder.reopen() is None:
        return None
    return result["diverged_at"], result.get("reason", "the model")


def _restored(folder: RunFolder, journal: Journal, run: FederatedRun) -> bool:
    """Restore the run from its journal; return whether it is complete."""
    if journal.state is not None:
        _restore(run, journal.state, journal.rows, folder.path)
        run.earlier = journal.earlier
    changes = ", ".join(
        f"{name.removeprefix('options.')} {_text(now)} (was {_text(then)})"
        for name, (then, now) in folder.changes.items()
    )
    if load_run(folder.path).result is not None:
        log(INFO, FINISHED, folder.path)
        if changes:
            log(WARNING, NO_EFFECT, changes)
        return True
    if run.settings.privacy is not None:
        reported = sum("epsilon" in row for row in journal.rows)
        run.ledger = open_ledger(folder.path / RELEASES, reported)
    if journal.resumed_from or changes:
        text = f" with {changes}" if changes else ""
        log(INFO, "resuming %s after round %d%s", folder.path, journal.resumed_from, text)
        if new := folder.note_resumed(journal.resumed_from):
            run.notes["changed"] = {name: list(pair) for name, pair in new.items()}
    return False


def _text(value: Any) -> str:
    return "none" if value is None else shown(value)


def _restore(run: FederatedRun, state: SimulationState, rows: Sequence[Row], folder: Path) -> None:
    """Restore the run; refuse rows that no run on Flower has written."""
    try:
        run.restore(state, rows)
        restored_result(rows)
        restored_config(rows[-1], {})
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise UsageError(
            f"{folder / RECORDS} is damaged: its rows are not those of a run on Flower "
            f"({type(error).__name__}); restore it, or remove the folder to start over"
        ) from error


def round_row(round: int, result: Result, accepted: Sequence[str]) -> Row:
    """Return the row of a round: the columns of a simulated run, and Flower's records.

    Args:
        round: counted from 1.
        result: with the records of the round.
        accepted: clients whose state of this round counts.
    """
    records = {name: getattr(result, of).get(round) for name, of in RESULT_FIELDS.items()}
    trained: Mapping[str, Any] = records["trained"] or {}
    row: Row = {"round": round, "server_lr": None, "local_lr": None}
    row |= {n: v for n, v in trained.items() if n not in RESERVED and not isinstance(v, list)}
    row |= dict.fromkeys(SCORES) | scores(records["evaluated"]) | scores(records["central"])
    row |= {name: int(row[name]) for name in ("clients", "dropped", "unanswered") if name in row}
    row |= {name: dict(record) for name, record in records.items() if record is not None}
    if accepted:
        row["accepted"] = list(accepted)
    if round == 1 and 0 in result.evaluate_metrics_serverapp:
        row["initial"] = dict(result.evaluate_metrics_serverapp[0])
    return row


def changed_config(config: Mapping[str, Any], initial: Mapping[str, Any]) -> Row:
    """Return the entries of a config that differ from the initial one, e.g. a rate that decays.

    They are columns of a row, which has the initial values too; none where nothing differs.
    """
    changed = {
        name: value
        for name, value in config.items()
        if name != "server-round" and value != initial.get(name) and not isinstance(value, bytes)
    }
    before = {name: _toml(initial.get(name)) for name in changed}
    return {"config": changed, "initial_config": before} if changed else {}


def restored_config(row: Row, initial: Mapping[str, Any]) -> ConfigRecord:
    """Return the entries of a row's config whose initial values are the same now."""
    before = ConfigRecord(row.get("initial_config", {}))
    changed = ConfigRecord(row.get("config", {})).items()
    return ConfigRecord({n: v for n, v in changed if before.get(n) == _toml(initial.get(n))})


def scores(record: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the losses and accuracies of a record as columns of a row, by their usual names.

    >>> scores({"eval_acc": 0.5, "loss": 1.0, "num-examples": 10, "test_loss": 2.0})
    {'test_accuracy': 0.5, 'test_loss': 2.0}
    """
    columns: dict[str, float] = {}
    for name, value in (record or {}).items():
        plain = name.lower().replace("-", "_")
        for prefix in ("eval_", "test_"):
            plain = plain.removeprefix(prefix)
        column = name if name in SCORES else SYNONYMS.get(plain)
        if column is not None and not isinstance(value, list):
            columns[column] = float(value)
    return columns


def check_losses(round: int, evaluated: Mapping[str, Any] | None) -> None:
    """Raise `DivergedError` where the server's own evaluation has a loss that is not finite.

    Clients' metrics never end a run: otherwise a single client could.
    """
    for name, value in scores(evaluated).items():
        if name in ("train_loss", "test_loss") and not math.isfinite(value):
            raise DivergedError(round, f"{name} is {value}")


def restored_result(rows: Sequence[Mapping[str, Any]]) -> Result:
    """Return the result of stored rounds, without its arrays."""
    result = Result()
    for row in rows:
        for name, of in RESULT_FIELDS.items():
            if name in row:
                getattr(result, of)[row["round"]] = _record(row[name])
        if "initial" in row:
            result.evaluate_metrics_serverapp[0] = _record(row["initial"])
    return result


def _record(values: Mapping[str, Any]) -> MetricRecord:
    """Return a stored record; what was not finite is null in the file, and NaN in a list here."""
    record = MetricRecord()
    for name, value in values.items():
        if isinstance(value, list):
            record[name] = [math.nan if number is None else number for number in value]
        elif value is not None:
            record[name] = value
    return record


def run_spec(strategy: RuleStrategy, run: FederatedRun, config: ConfigRecord) -> dict[str, Any]:
    """Return the spec of a run, with the keys of a simulated one where they mean the same."""
    settings = run.settings
    spec = {
        "task": settings.name,
        "algorithm": settings.algorithm.name,
        "mode": "paper",
        "seed": settings.seed,
        "rounds": run.rounds,
        "evaluate_every": settings.evaluate_every,
        "engine": "flower",
        "deterministic": False,
        "study": run.study,
        "model": _model(run.layout),
        "set": {},
        "options": _options(strategy, settings, config),
    }
    return tomllib.loads(tomli_w.dumps(spec))


def _options(strategy: RuleStrategy, settings: Settings, config: ConfigRecord) -> dict[str, Any]:
    algorithm, weight_key = settings.algorithm, strategy.weighted_by_key
    is_usual = settings.weights == "uniform" or weight_key == "num-examples"
    options = {
        **_fields(algorithm.client),
        **_fields(algorithm.server),
        "average_last": algorithm.iterates,
        "weighting": settings.weights,
        "fraction_train": strategy.fraction_train,
        "min_train_nodes": strategy.min_train_nodes,
        "total_clients": settings.total_clients,
        "max_norm": settings.max_norm,
        "bound": algorithm.bound,
        "min_replies": settings.min_replies if settings.min_replies > 1 else None,
        "weighted_by_key": None if is_usual else weight_key,
        **{f"privacy.{name}": value for name, value in _fields(settings.privacy).items()},
        **{f"secure.{name}": value for name, value in _fields(settings.secure).items()},
        **{f"train_config.{name}": value for name, value in config.items()},
    }
    return {name: _toml(value) for name, value in options.items() if value is not None}


def _fields(rule: Any) -> dict[str, Any]:
    """Return the fields of a rule or of settings, which are dataclasses; {} for None."""
    return {f.name: getattr(rule, f.name) for f in fields(rule)} if is_dataclass(rule) else {}


def _toml(value: Any) -> Any:
    """Return the value as TOML stores it; infinity and Python objects as strings."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_toml(entry) for entry in value]
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _model(layout: Layout) -> str:
    """Return a description of the model, with a digest of the names, shapes and types of its
    arrays."""
    slots = "\n".join(f"{s.name} {s.shape} {s.dtype} {s.kind}{s.source}" for s in layout.slots)
    digest = hashlib.sha256(slots.encode()).hexdigest()[:10]
    return f"{len(layout.slots)} arrays, {layout.dim} parameters ({digest})"
