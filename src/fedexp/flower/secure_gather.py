"""`secure_gather`: what `gather` does, where the server may see nothing but the sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore import log
from torch import Tensor

from fedexp.aggregate import Aggregate
from fedexp.flower.core import Server
from fedexp.flower.gather import Gathered
from fedexp.flower.secure import SecureAggregation, terms_of
from fedexp.flower.secure_payload import Payload, Sums
from fedexp.flower.secure_stages import StageGrid
from fedexp.flower.secure_workflow import SecureRound

COARSE = 1e-3  # from this share of rounding in the norms on, the clip is too wide


def secure_gather(
    secure: SecureAggregation,
    server: Server,
    grid: Grid,
    messages: Sequence[Message],
    *,
    key: str,
    round: int,
    timeout: float,
) -> Gathered:
    """The sums of a round; of no clients where it had to be given up, and a line says why.

    Its metrics are `clipped`, how many clients scaled their update down to the clip, and
    `rounding_share`, the part of the mean squared norm that rounding made.

    Args:
        secure: the settings.
        server: whose model the messages carry.
        grid: where the nodes are.
        messages: the train messages, one to a node.
        key: of the model in messages and replies.
        round: the round, counted from 1.
        timeout: seconds for all of it.
    """
    nothing = Gathered(Aggregate.zero(server.layout.dim, server.state.params.dtype))
    if len(messages) < secure.fewest:
        told = "round %d: a secure sum needs %d clients, and there are %d; the model stays as it is"
        log(WARNING, told, round, secure.fewest, len(messages))
        return nothing
    payload = secure.payload(server.algorithm.client, server.layout, len(messages))
    nodes = {message.metadata.dst_node_id: message for message in messages}
    workflow = SecureRound(secure, payload, terms_of(payload, server.layout, key), nodes)
    stages = StageGrid(grid, payload.size, timeout)
    found = _run(workflow, stages, payload, round)
    unanswered = tuple(stages.unanswered)
    without = replace(nothing, dropped=len(stages.refused), unanswered=unanswered)
    if found is None:
        return without
    sums, accepted = found
    return replace(
        without,
        aggregate=_aggregate(server, sums, len(accepted)),
        accepted=accepted,
        metrics=_metrics(payload, sums, len(accepted)),
    )


def _run(
    workflow: SecureRound, stages: StageGrid, payload: Payload, round: int
) -> tuple[Sums, tuple[int, ...]] | None:
    """The sums and whose they are; None where the round must not touch the model."""
    try:
        unmasked = workflow.run(stages, round)
        sums = unmasked and payload.unpack(unmasked.mean, len(unmasked.nodes))
    except Exception as error:  # shares and vectors that do not fit make it raise what it likes
        log(WARNING, "round %d: the secure sum failed (%r); the model stays as it is", round, error)
        return None
    if unmasked is None or sums is None:
        _explain(round, workflow, stages)
        return None
    if not _plausible(payload, sums, len(unmasked.nodes)):
        log(WARNING, "round %d: the secure sum is damaged; the model stays as it is", round)
        return None
    return sums, tuple(unmasked.nodes)


def _aggregate(server: Server, sums: Sums, clients: int) -> Aggregate:
    """The sums as rules know them."""
    state = server.state
    extras = {name: torch.from_numpy(value) for name, value in sums.extras.items()}
    return Aggregate(
        weight=_number(clients),
        update=torch.from_numpy(sums.update).to(state.params.dtype),
        sq_norm=_number(sums.sq_norm),
        count=_number(clients),
        dropped=_number(0),
        extras={name: value.to(state.params.dtype) for name, value in extras.items()},
    )


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _plausible(payload: Payload, sums: Sums, clients: int) -> bool:
    """Whether masks came off: what is left of them breaks ||mean||² <= mean of squares <= C²."""
    sq_norm_of_sum = float(np.square(sums.update).sum())
    least = sq_norm_of_sum / clients / 1.000001 - payload.rounding
    most = clients * (payload.clip**2 * 1.001 + payload.rounding)
    return least <= sums.sq_norm <= most and 0 <= sums.clipped <= clients


def _metrics(payload: Payload, sums: Sums, clients: int) -> dict[str, float]:
    mean_sq_norm = sums.sq_norm / clients
    share = payload.rounding / mean_sq_norm if mean_sq_norm else 0.0
    if share > COARSE:
        log(
            WARNING,
            "updates are %.0e times the clip, so that rounding makes %.1f %% of their squared "
            "norm; lower clip",
            mean_sq_norm**0.5 / payload.clip,
            100 * share,
        )
    return {"clipped": float(sums.clipped), "rounding_share": share}


def _explain(round: int, workflow: SecureRound, stages: StageGrid) -> None:
    asked = len(workflow.messages)
    log(
        WARNING,
        "round %d: %d of %d clients are left, too few to unmask their sum (it takes %s of %s "
        "shares of a key, and %d clients); the model stays as it is",
        round,
        asked - len(stages.refused) - len(stages.unanswered),
        asked,
        workflow.reconstruction_threshold,
        workflow.num_shares,
        workflow.fewest,
    )
