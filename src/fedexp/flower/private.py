"""Local privacy on Flower: a client clips and noises its update before it leaves the node."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedexp.errors import require
from fedexp.flower.budget import Budget
from fedexp.flower.layout import Layout, ndarrays
from fedexp.flower.quiet import quietly
from fedexp.flower.request import ties_in
from fedexp.privacy import LocalMechanism, LocalPrivacy, clip
from fedexp.privacy.noise import Normals, normals

NOT_MEASURED = (
    "local privacy does not cover what a client measures, so this client answers no evaluation; "
    "set fraction_evaluate=0.0, and evaluate on the server by evaluate_fn"
)


def local_privacy(
    privacy: LocalPrivacy, buffers: Collection[str] | None = None, account: str = "default"
) -> Mod:
    """A mod for a ClientApp: `ClientApp(mods=[local_privacy(LocalPrivacy(...))])`.

    Of a reply to `train`, only the noised model leaves: other metrics are dropped, `num-examples`
    becomes 1, and of an error only its type is reported. Requests to `evaluate` are refused: what a
    client measures is not noised. Replies to `query` are not touched. The client's own settings
    decide; a server that reckons with others gets no update.

    Args:
        privacy: the settings, the same as the server's.
        buffers: names of arrays that are averaged, as the strategy has them.
        account: which budget of this client is spent, where `privacy.rounds` gives one. Apps that
            train on the same data must share an account.
    """
    mechanism = privacy.mechanism()

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        require(kind != "evaluate", NOT_MEASURED)
        if kind != "train":
            return call_next(message, context)
        config = _told(message.content)
        _check_agreement(config, mechanism)
        sent = _only_arrays(message.content, "the server's message")
        layout = Layout.of(sent, buffers, ties_in(config))
        _require_no_buffers(layout)
        if privacy.rounds is not None:
            Budget.of(privacy, account, context).spend()
        trained = quietly(call_next, message, context)
        draw = normals(privacy.noise_seed, int(config.get("server-round", 0)), context.node_id)
        return Message(_noised(trained, sent, layout, mechanism, draw), reply_to=message)

    return mod


def _noised(
    content: RecordDict, sent: ArrayRecord, layout: Layout, mechanism: LocalMechanism, draw: Normals
) -> RecordDict:
    """The reply with its update clipped and noised, and nothing else of the client's in it."""
    trained = ndarrays(_only_arrays(content, "the reply"))
    misfit = layout.misfit(trained)
    require(misfit is None, f"the reply does not fit the model: {misfit}")
    start = layout.flat(sent)
    update = _private_update(start - layout.flat(trained), mechanism, draw)
    arrays = layout.arrays((start - update).to(start.dtype), layout.buffers(sent))
    key = next(iter(content.array_records))
    metrics = next(iter(content.metric_records), "metrics")
    return RecordDict({key: arrays, metrics: MetricRecord({"num-examples": 1})})


def _private_update(update: Tensor, mechanism: LocalMechanism, draw: Normals) -> Tensor:
    """Clipped, plus noise, in float64; an update that is not finite counts as none at all."""
    finite = bool(update.isfinite().all())
    bounded = clip(update, mechanism.clip) if finite else torch.zeros_like(update)
    return bounded + mechanism.sigma * draw(update.numel())


def _told(content: RecordDict) -> dict[str, Any]:
    """What the server's message says, in whichever record."""
    told: dict[str, Any] = {}
    for record in content.config_records.values():
        told |= dict(record)
    return told


def _check_agreement(told: Mapping[str, Any], mechanism: LocalMechanism) -> None:
    """Refuse a server that reckons with other noise than is added here."""
    for key, ours in mechanism.config().items():
        theirs = told.get(key, ours)
        require(
            abs(float(theirs) - ours) <= 1e-9 * ours,
            f"the server reckons with {key} = {theirs}, this client has {ours}; "
            "give both the same LocalPrivacy",
        )


def _only_arrays(content: RecordDict, what: str) -> ArrayRecord:
    records = content.array_records
    require(
        len(records) == 1,
        f"{what} has {len(records)} records of arrays; local privacy covers a model and nothing "
        "beside it, so use a client rule without control variates",
    )
    return next(iter(records.values()))


def _require_no_buffers(layout: Layout) -> None:
    names = ", ".join(layout.averaged)
    require(
        not names,
        f"{names} would leave the client as they are; local privacy needs a model without "
        "BatchNorm (GroupNorm will do)",
    )
