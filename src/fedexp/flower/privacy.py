"""Differential privacy on Flower: the client's mod, its privacy budget, and the run's ledger.

With local privacy a client clips and noises its update before it leaves the node, and counts its
releases. With central privacy the server charges each round to the ledger of the run. Both counts
are files, written before the release is made, so that neither a restart nor a message of the other
side can undo a charge: Flower's `context.state` ends with the SuperNode.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedexp.errors import UsageError, remedies, require
from fedexp.flower.client_state import configured_name, file_name, state_root
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.request import REPLY_INFO, read_ties
from fedexp.privacy import Ledger, LocalMechanism, LocalPrivacy, Release
from fedexp.privacy.mechanism import Normals, normals
from fedexp.privacy.settings import warn_seeded
from fedexp.runs.checkpoint import release_rows, releases_from
from fedexp.storage import disk_errors, lock_file, parse_json, sync_folder, write_json

Releases = Mapping[Release, int]
FILE = "released.json"
FOLDER = ".privacy"  # no study can have this name: names of studies begin with a letter or digit
NO_LOCKS = "a privacy budget needs file locks; put fedexp-state on a disk that has them"
NO_EVALUATION = (
    "local privacy does not cover evaluation metrics, so this client answers no evaluation; set "
    "fraction_evaluate=0.0, and evaluate on the server by evaluate_fn"
)


def local_privacy(
    privacy: LocalPrivacy, buffers: Collection[str] | None = None, account: str = "default"
) -> Mod:
    """Return a mod for a ClientApp: `ClientApp(mods=[local_privacy(LocalPrivacy(...))])`.

    A reply to `train` contains the noised model and its clip and noise only: other metrics are
    dropped, `num-examples` becomes 1, and of an error only its type is reported. Messages to
    `evaluate` are refused, because evaluation metrics are not noised. Replies to `query` are not
    changed. The client's own settings decide; a server with other settings gets no update.

    Args:
        privacy: the settings, the same as the server's.
        buffers: names of arrays that are averaged, as the strategy has them.
        account: the budget of this client that is spent, where `privacy.rounds` sets one. Apps that
            train on the same data must share an account.
    """
    mechanism = privacy.mechanism()
    warn_seeded(privacy)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        require(kind != "evaluate", NO_EVALUATION)
        if kind != "train":
            return call_next(message, context)
        records = message.content.config_records.values()
        config: dict[str, Any] = {key: value for record in records for key, value in record.items()}
        _check_agreement(config, mechanism)
        sent = _only_arrays(message.content, "the server's message")
        layout = Layout.of(sent, buffers, read_ties(config))
        names = ", ".join(layout.averaged)
        require(
            not names,
            f"{names} would leave the client without noise; local privacy needs a model without "
            "BatchNorm (GroupNorm will do)",
        )
        if privacy.rounds is not None:
            client = state_root(context) / FOLDER / file_name(configured_name(context))
            spend(client / file_name(account), mechanism.plan(1, 1), privacy.rounds)
        trained = train_with_hidden_errors(call_next, message, context)
        draw = normals(privacy.noise_seed, int(config.get("server-round", 0)), context.node_id)
        return Message(_noised(trained, sent, layout, mechanism, draw), reply_to=message)

    return mod


def train_with_hidden_errors(
    call_next: ClientAppCallable, message: Message, context: Context
) -> RecordDict:
    """Call the train function; return its reply's content.

    Error texts reach the server and may contain data, so only the type of an exception is reported.
    """
    try:
        reply = call_next(message, context)
    except UsageError:  # names a remedy, and contains no data
        raise
    except Exception as error:
        name = type(error).__name__
        raise RuntimeError(f"training raised {name}; the client's log has the details") from error
    require(reply.has_content(), "the train function replied with an error")
    return reply.content


def _noised(
    content: RecordDict, sent: ArrayRecord, layout: Layout, mechanism: LocalMechanism, draw: Normals
) -> RecordDict:
    """Return the reply with its update clipped and noised, and nothing else of the client's.

    It is marked with clip and noise: the server refuses updates without this mark.
    """
    trained = ndarrays(_only_arrays(content, "the reply"))
    misfit = layout.misfit(trained)
    require(misfit is None, f"the reply does not fit the model: {misfit}")
    start = layout.flat(sent)
    private = mechanism.noised(start - layout.flat(trained), draw)
    arrays = layout.arrays((start - private).to(start.dtype), layout.buffers(sent))
    key = next(iter(content.array_records))
    metrics = next(iter(content.metric_records), "metrics")
    mark = ConfigRecord(dict(mechanism.config()))
    return RecordDict({key: arrays, metrics: MetricRecord({"num-examples": 1}), REPLY_INFO: mark})


def _check_agreement(config: Mapping[str, Any], mechanism: LocalMechanism) -> None:
    """Refuse a server that is configured for other noise than is added here."""
    for key, value in mechanism.config().items():
        of_server = config.get(key, value)
        require(
            abs(float(of_server) - value) <= 1e-9 * value,
            f"the server is configured with {key} = {of_server}, this client with {value}; "
            "give both the same LocalPrivacy",
        )


def _only_arrays(content: RecordDict, what: str) -> ArrayRecord:
    records = content.array_records
    require(
        len(records) == 1,
        f"{what} has {len(records)} records of arrays; local privacy covers the model only, so "
        "use a client rule without control variates",
    )
    return next(iter(records.values()))


def spend(account: Path, release: Release, rounds: int) -> None:
    """Count one noised update before the training, or refuse it where the budget is spent.

    The client counts by itself: nothing that a server sends, neither the name of a run nor the
    node's id, decides where or what is counted. All apps on a client share one count unless they
    name different accounts, which is right for unrelated data only. Failed trainings are charged
    too. Gaussian releases compose by adding 1 / z², so releases with other noise count as well.
    Where the count is missing or cannot be read, the budget counts as spent.

    Args:
        account: the folder with the count; exists from the first release on.
        release: the cost of one update.
        rounds: how many such updates may be released.
    """
    accounts = account.parent.parent  # one lock for all, so that processes take turns
    with disk_errors(account):
        accounts.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = accounts / "lock"
    with disk_errors(account), remedies({"lock": NO_LOCKS}), lock_file(lock, wait=True):
        spent = _spent(account)
        after = sum(count * _cost(other) for other, count in spent.items()) + _cost(release)
        require(
            after <= rounds * _cost(release) * (1 + 1e-9),
            f"this client has taken part in {sum(spent.values())} rounds, all that its privacy "
            "budget allows",
        )
        _store(account, {**spent, release: spent.get(release, 0) + 1})


def _spent(account: Path) -> Releases:
    if not account.exists():
        return {}
    try:
        return _read(account / FILE)
    except UsageError as error:
        raise UsageError(
            "the count of this client's releases is missing or cannot be read, so its privacy "
            f"budget counts as spent; restore {FILE} in {FOLDER} of its fedexp-state folder"
        ) from error


def _store(account: Path, releases: Releases) -> None:
    """Write the count; a new account is created together with its file, atomically."""
    if account.exists():
        _write(account / FILE, releases)
        return
    account.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = account.with_name(f".{account.name}.new")
    fresh.mkdir(mode=0o700, exist_ok=True)
    _write(fresh / FILE, releases)
    os.rename(fresh, account)
    sync_folder(account.parent)


def open_ledger(path: Path, reported: int) -> Ledger:
    """Open the ledger of a run; every charge is written to its file before it counts.

    Args:
        path: of the file.
        reported: rounds of the run that have reported a cost; the file must have at least these.
    """
    releases = _read(path) if path.exists() or reported else {}
    require(
        sum(releases.values()) >= reported,
        f"{path} has fewer releases than the run has private rounds, so what was spent is not "
        "known; restore it, or start over in another folder with a budget of its own",
    )
    return Ledger(releases, lambda after: _write(path, after))


def _read(path: Path) -> dict[Release, int]:
    """Read the releases of a file; raise `UsageError` for one that is missing or damaged."""
    try:
        return releases_from(parse_json(path.read_bytes())["releases"])
    except (OSError, ArithmeticError, ValueError, LookupError, TypeError, UsageError) as error:
        raise UsageError(
            f"{path} is missing or damaged ({type(error).__name__}), so what is left of the "
            "privacy budget is not known; restore it, or start over in another folder"
        ) from error


def _cost(release: Release) -> float:
    """Return 1 / z², infinite where it overflows."""
    inverse = 1.0 / release.noise_multiplier
    return inverse * inverse


def _write(path: Path, releases: Releases) -> None:
    with disk_errors(path.parent):
        write_json(path, {"releases": release_rows(releases)}, mode=0o600)
