"""Shakespeare for a few workers: prediction of the next character by a small GPT.

A task for studies of outer optimisers, such as local SGD and DiLoCo (Douillard et al., 2023):
all workers take part in every round, and each takes some dozens of steps of AdamW on its part of
one text. By default a worker's moments start at zero in every round; DiLoCo keeps them
(`fedexp.diloco_local`).

The text is that of the data set `shakespeare`, speech after speech of role after role, play after
play in alphabetical order, each speech followed by a token that ends it. It is cut into windows of
`context` characters. The test text has later speeches of the same roles.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np

from fedexp import models
from fedexp.data import partition
from fedexp.data.federation import Batch, Federation
from fedexp.errors import require, whole_number
from fedexp.local import LocalTraining
from fedexp.seeding import generator
from fedexp.tasks.images import load_splits
from fedexp.tasks.shakespeare import BEGIN, PAD
from fedexp.tasks.supervised import supervised
from fedexp.tasks.task import Task

Chunks = Literal["random", "contiguous"]
TEST_SHARE = 4  # characters of training text per character of test text, as in the data set
ROUNDS, EVALUATE_EVERY = 40, 5


def tinygpt(
    workers: int = 8,
    chunks: Chunks = "random",
    context: int = 64,
    width: int = 64,
    layers: int = 3,
    heads: int = 4,
    characters: int = 500_000,
    seed: int = 0,
    folder: str | None = None,
) -> Task:
    """Return next-character prediction by a small GPT (165,210 parameters) for a few workers.

    Args:
        workers: number of workers, which all take part in every round.
        chunks: "random" deals the windows of the text to the workers at random, so that all have
            the same distribution; "contiguous" gives each one consecutive part, i.e. other plays.
        context: characters in a window.
        width: width of the model's layers.
        layers: number of layers.
        heads: attention heads; a divisor of the width.
        characters: length of the training text, by default the first five plays and most of the
            sixth; the test text has a quarter of it at most. All plays have 3.4 million.
        seed: seed of the random chunks.
        folder: the data folder; by default the one that `FEDEXP_DATA` names.
    """
    require(
        chunks in ("random", "contiguous"), f"chunks must be random or contiguous, not {chunks!r}"
    )
    data = load_splits("shakespeare", folder)
    train = windows(data.train, characters, context)
    count = len(train["x"])
    parts = partition.iid(count, workers, generator(seed, "tinygpt chunks"))
    if chunks == "contiguous":
        parts = np.array_split(np.arange(count), workers)
    return supervised(
        "tinygpt",
        partial(models.tinygpt, data.classes, context, width, layers, heads),
        Federation.from_parts(train, parts),
        windows(data.test, characters // TEST_SHARE, context),
        goal="min:test_loss",
        local=LocalTraining(lr=0.01, steps=32, batch_size=16, optimizer="adamw", weight_decay=0.1),
        rounds=ROUNDS,
        evaluate_every=EVALUATE_EVERY,
    )


def windows(text: Batch, characters: int, context: int) -> Batch:
    """Return the first characters of a text, cut into x, and the one after each of x, y.

    Both have the shape [windows, context]. Padding and beginnings of speeches are left out; so are
    the last characters where they do not fill a window.
    """
    whole_number("characters", characters, 1)
    whole_number("context", context, 1)
    tokens = text["y"]  # x does not have the last token of a role
    tokens = tokens[(tokens != PAD) & (tokens != BEGIN)][:characters]
    count = (len(tokens) - 1) // context
    require(
        count > 0,
        f"{len(tokens):,} characters do not fill a window of {context}; use a smaller context, or "
        "more characters",
    )
    ends = count * context
    return {"x": tokens[:ends].view(count, -1), "y": tokens[1 : ends + 1].view(count, -1)}
