"""Shakespeare by role: prediction of the next character, with an LSTM or a small transformer.

The settings are those of Reddi et al. (2021): 10 roles per round, batches of 4 sequences of 80
tokens, one epoch, SGD with step size 1, 1,200 rounds, and their network. FLUTE and FedML publish
times for the same settings with step size 0.8 (README of microsoft/msrflute). Roles have the same
weight here; `weighting=size` weighs them by their sequences.

**What counts.** Loss and accuracy are over all tokens of a text except padding and BEGIN. The
reference code of Reddi et al. (google-research/federated) and FLUTE leave out padding alone, and
count the end of a speech and unknown characters; so does this task. BEGIN is never a target there,
because every speech starts a new sequence; in the sequences of this data set it follows END with
certainty, and would raise the accuracy.

**The loss of an example** is the sum over its counted tokens, divided by the 80 tokens of a
sequence, so that every engine can pad batches. Within a batch each counted token has the same
weight, as in the mean over the counted tokens of a batch that FLUTE takes: the gradients have the
same direction, and the same length up to the fraction of tokens that count (98 % on average, much
less only in batches with the last sequence of a role). Evaluations divide by the tokens that count:
`test_accuracy` and `test_loss` are means over all counted tokens of the test set, `train_*` the
means over roles of these means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fedexp.data.federation import Batch, Federation
from fedexp.errors import require
from fedexp.local import LocalTraining
from fedexp.models import char_lstm, char_transformer
from fedexp.objective import ModuleObjective
from fedexp.tasks.images import load_splits
from fedexp.tasks.recipe import RECIPES
from fedexp.tasks.supervised import supervised
from fedexp.tasks.task import Task

Model = Literal["lstm", "transformer"]
PAD, BEGIN = 0, 88  # as in fedexp.data.sources.shakespeare, which is imported with the data only
COHORT, ROUNDS, EVALUATE_EVERY, BATCH = 10, 1200, 50, 4


def shakespeare(model: Model = "lstm", folder: str | None = None) -> Task:
    """Return Shakespeare by role, next-character prediction; the LSTM of Reddi et al. (2021).

    Args:
        model: "lstm" (822,570 parameters) or "transformer" (826,714), see `fedexp.models`.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    require(model in ("lstm", "transformer"), f"model must be lstm or transformer, not {model!r}")
    data = load_splits("shakespeare", folder)
    train, test = (with_counted_targets(batch) for batch in (data.train, data.test))
    length = train["x"].shape[1]
    build: Callable[[], nn.Module] = partial(char_lstm, data.classes)
    if model == "transformer":
        build = partial(char_transformer, data.classes, length)
    federation = replace(data, train=train).federation()
    name = "shakespeare" if model == "lstm" else "shakespeare-transformer"
    recipe = RECIPES[name]
    task = supervised(
        name,
        build,
        federation,
        test if data.test_offsets is None else Federation(test, data.test_offsets),
        local=LocalTraining(lr=recipe["tuned"]["fedavg"]["local.lr"], epochs=1, batch_size=BATCH),
        cohort=min(COHORT, federation.clients),
        rounds=ROUNDS,
        evaluate_every=EVALUATE_EVERY,
        **recipe,
    )
    return replace(task, objective=counting_objective(task), counted=counted_part)


def with_counted_targets(batch: Batch) -> Batch:
    """Return the sequences with PAD instead of BEGIN among the targets."""
    return {"x": batch["x"], "y": batch["y"].masked_fill(batch["y"] == BEGIN, PAD)}


def counted_part(batch: Batch) -> Tensor:
    """Return the fraction of each sequence's targets that count, [n].

    >>> counted_part({"y": torch.tensor([[5, 7, 9, PAD]])}).tolist()
    [0.75]
    """
    return (batch["y"] != PAD).to(torch.float32).mean(dim=1)


def counting_objective(task: Task) -> ModuleObjective:
    """Return a task's objective with targets that are PAD left out of loss and accuracy."""
    assert isinstance(task.objective, ModuleObjective)
    loss = nn.CrossEntropyLoss(ignore_index=PAD, reduction="none")
    return task.objective.with_loss(loss, classifies=True, ignore_index=PAD)
