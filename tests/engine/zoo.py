"""The engine zoo: unusual models and losses, and which engine must train each of them.

An engine that a case marks True must train it as the loop does, False must refuse it in one line,
and None may do either. Whoever trains must give the loop's numbers. Models are tiny, clients have
unequal sizes, and the last batch of an epoch is short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.engine import zoo_models as models
from tests.engine.zoo_models import CLASSES, LENGTH, WIDTH, WORDS, Build, Loss

UNEQUAL = (7, 10, 3, 6)  # in batches of 4: short last batches of 3, 2, 3 and 2 examples
EQUAL = (10, 10, 10, 10)  # short last batches of 2 for all


@dataclass(frozen=True)
class Case:
    """A model with its data and loss.

    Args:
        name: identifies the case.
        build: makes the model, in float32.
        data: "vectors" [n, 6], "images" [n, 2, 6, 6], "tokens" [n, 5] or "series" [n, 5, 4].
        labels: "classes" [n], "numbers" [n, 1], "many" [n, 3] of 0 and 1, or "each" [n, 5].
        loss: per example; the cross entropy when None.
        sizes: examples of each client.
        batched, threads, dense: whether the engine must train it (True), must refuse it (False),
            or may do either (None).
        draws: layers draw random numbers, and other ones in another precision.
        large: "auto" takes threads for it, where there are several cores.
        redraws: layers draw random numbers that other engines may draw differently, so that only
            the loop is compared.
    """

    name: str
    build: Build
    data: str = "vectors"
    labels: str = "classes"
    loss: Loss | None = None
    sizes: tuple[int, ...] = UNEQUAL
    batched: bool | None = True
    threads: bool | None = True
    dense: bool | None = False
    draws: bool = False
    redraws: bool = False
    large: bool = False


def examples(data: str, labels: str, count: int) -> tuple[Tensor, Tensor]:
    """Draw inputs and labels that depend on them, always the same."""
    draw = torch.Generator().manual_seed(5)
    kind = torch.randint(0, CLASSES, (count,), generator=draw)
    if data == "tokens":
        x = (torch.randint(0, WORDS, (count, LENGTH), generator=draw) + kind[:, None]) % WORDS
        each = x % CLASSES
    else:
        shape = {"vectors": (WIDTH,), "images": (2, 6, 6), "series": (LENGTH, 4)}[data]
        centres = torch.randn(CLASSES, *shape, generator=draw)
        x = centres[kind] + torch.randn(count, *shape, generator=draw)
        each = (x.flatten(1)[:, :LENGTH] > 0).long()
    if labels == "classes":
        return x, kind
    if labels == "each":
        return x, each
    if labels == "numbers":
        return x, kind[:, None].float() - 1 + 0.1 * torch.randn(count, 1, generator=draw)
    return x, torch.stack([kind == 0, kind > 0, each[:, 0] > 0], dim=1).float()


# The tables -----------------------------------------------------------------------------------

DENSE: dict[str, Any] = {"dense": True}
PERHAPS: dict[str, Any] = {"batched": None, "threads": None, "dense": None}


def image_case(name: str, *layers: Callable[[], nn.Module], channels: int = 4, **k: Any) -> Case:
    return Case(
        name,
        lambda: models.on_images(*(layer() for layer in layers), channels=channels),
        "images",
        **k,
    )


PLAIN = [
    Case("linear", lambda: nn.Linear(WIDTH, CLASSES), **DENSE),
    Case("mlp-relu", models.mlp, **DENSE),
    Case("mlp-tanh", partial(models.mlp, nn.Tanh), **DENSE),
    Case("mlp-sigmoid", partial(models.mlp, nn.Sigmoid), **DENSE),
    Case("mlp-no-bias", partial(models.mlp, bias=False), **DENSE),
    Case("mlp-equal-clients", models.mlp, sizes=EQUAL, **DENSE),
    Case("mlp-gelu", partial(models.mlp, nn.GELU), dense=None),
    Case("mlp-softplus", partial(models.mlp, nn.Softplus), dense=None),
    Case("mlp-prelu", partial(models.mlp, nn.PReLU)),
    Case("mlp-relu-in-place", partial(models.mlp, partial(nn.ReLU, inplace=True)), dense=None),
    Case(
        "layer-norm",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
    ),
    Case(
        "rms-norm",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.RMSNorm(8), nn.ReLU(), nn.Linear(8, 3)),
    ),
    Case(
        "batch-norm-1d",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    ),
    Case(
        "dropout-of-nothing",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 3)),
        dense=None,
    ),
    Case("bilinear", models.bilinear),
    Case("einsum", models.two_layers(models.by_einsum)),
    Case("input-in-place", models.two_layers(models.input_in_place), batched=None),
    Case("fft", models.two_layers(models.spectral)),
]

CONVOLUTIONS = [
    image_case("conv-group-norm", models.conv, lambda: nn.GroupNorm(2, 4), nn.ReLU),
    image_case("conv-batch-norm", models.conv, lambda: nn.BatchNorm2d(4), nn.ReLU),
    image_case(
        "conv-batch-norm-cumulative",
        models.conv,
        lambda: nn.BatchNorm2d(4, momentum=None),  # it divides by its counter on the host
        nn.ReLU,
        batched=None,
    ),
    image_case(
        "conv-batch-norm-no-statistics",
        models.conv,
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        nn.ReLU,
    ),
    image_case("conv-pool", models.conv, nn.ReLU, lambda: nn.MaxPool2d(2)),
    image_case("conv-average-pool", models.conv, nn.ReLU, lambda: nn.AvgPool2d(2)),
    image_case(
        "conv-instance-norm", models.conv, lambda: nn.InstanceNorm2d(4, affine=True), nn.ReLU
    ),
    image_case("conv-local-response", models.conv, lambda: nn.LocalResponseNorm(2), nn.ReLU),
    image_case(
        "conv-depthwise",
        partial(models.conv, 2, 4, groups=2),
        partial(models.conv, 4, 4, groups=4),
        nn.ReLU,
    ),
    image_case("conv-strided", partial(models.conv, stride=2, padding=1), nn.ReLU),
    image_case("conv-dilated", partial(models.conv, dilation=2, padding=2), nn.ReLU),
    image_case(
        "conv-padding-reflect", partial(models.conv, padding=1, padding_mode="reflect"), nn.ReLU
    ),
    image_case("conv-padding-same", partial(models.conv, padding="same"), nn.ReLU),
    image_case(
        "conv-transposed", models.conv, nn.ReLU, lambda: nn.ConvTranspose2d(4, 4, 2, stride=2)
    ),
    image_case("conv-weight-norm", lambda: parametrizations.weight_norm(models.conv()), nn.ReLU),
    Case(
        "conv-1d",
        lambda: nn.Sequential(nn.Conv1d(5, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)),
        "series",
    ),
    Case("squeeze-excite", models.squeezed, "images"),
    Case("unfold", models.unfolded, "images"),
    Case("channels-last", models.channels_last, "images"),
    image_case("residual-group-norm", lambda: models.Residual(2, 4, lambda n: nn.GroupNorm(2, n))),
    image_case(
        "residual-batch-norm",
        lambda: models.Residual(2, 4, nn.BatchNorm2d),
        lambda: models.Residual(4, 4, nn.BatchNorm2d),
    ),
]

SEQUENCES = [
    Case("embedding", models.of_words(), "tokens"),
    Case("embedding-padding", models.of_words(padding_idx=0), "tokens"),
    Case("embedding-max-norm", models.of_words(max_norm=1.0), "tokens", batched=None, threads=None),
    Case(
        "embedding-by-frequency", models.of_words(scale_grad_by_freq=True), "tokens", batched=None
    ),
    Case("embedding-bag", models.of_bags(), "tokens", batched=None),
    Case("embedding-bag-max", models.of_bags(mode="max"), "tokens", batched=None),
    Case("lstm", models.of_last(nn.LSTM), "series"),
    Case("lstm-two-layers", models.of_last(nn.LSTM, num_layers=2, bidirectional=True), "series"),
    Case("lstm-per-token", models.next_words(nn.LSTM, num_layers=2), "tokens", "each"),
    Case("lstm-projections", models.of_last(nn.LSTM, bidirectional=True, proj_size=3), "series"),
    Case("gru", models.of_last(nn.GRU), "series"),
    Case("gru-per-token", models.next_words(nn.GRU, bidirectional=True), "tokens", "each"),
    Case("gru-in-steps", models.in_steps, "series"),
    Case("rnn", models.of_last(nn.RNN), "series"),
    Case("lstm-cell", models.by_cell(nn.LSTMCell), "series"),
    Case("gru-cell", models.by_cell(nn.GRUCell), "series"),
    Case("rnn-cell", models.by_cell(nn.RNNCell), "series"),
    Case("multihead-attention", models.multihead, "series"),
    Case("attention-cross", models.crossing, "tokens"),
    Case("transformer-norm-first", partial(models.transformer, True), "series"),
    Case("transformer-norm-last", partial(models.transformer, False), "series"),
    Case("transformer-time-first", models.time_first, "series"),
    Case("transformer-causal", models.causal_transformer, "tokens", "each"),
    Case("attention-fused", partial(models.Attention, False), "tokens"),
    Case("attention-fused-causal", partial(models.Attention, True), "tokens"),
    Case("causal-mask", partial(models.CausalMask, CLASSES, False), "tokens"),
    Case("causal-mask-per-token", partial(models.CausalMask, CLASSES), "tokens", "each"),
    Case("per-token-labels", models.token_scores, "tokens", "each"),
]

WEIGHTS = [
    Case("tied", models.tied, "tokens"),
    Case("frozen-first", partial(models.frozen, "0"), dense=None),
    Case("frozen-bias", partial(models.frozen, "2.bias"), dense=None),
    Case("aliased", models.aliased),
    Case("layer-twice", models.twice, dense=None),
    Case("activation-twice", models.one_activation, dense=None),
    Case("weight-norm", partial(models.parametrised, parametrizations.weight_norm)),
    Case(
        "spectral-norm",
        partial(models.parametrised, parametrizations.spectral_norm),
        batched=None,
        threads=None,
    ),
    Case(
        "orthogonal",
        partial(models.parametrised, parametrizations.orthogonal),
        batched=None,
        threads=None,
    ),
    Case("symmetric", partial(models.parametrised, models.symmetric)),
    Case("bare-parameters", models.Bare),
    Case("cosine", models.two_layers(models.cosine)),
    Case("weight-norm-by-hand", models.two_layers(models.by_weight_norm)),
]

LOSSES = [
    Case("centred", models.mlp, loss=models.centred, **PERHAPS),
    Case("centred-equal", models.mlp, loss=models.centred, sizes=EQUAL, **PERHAPS),
    Case("contrastive", models.mlp, loss=models.contrastive, **PERHAPS),
    Case("contrastive-equal", models.mlp, loss=models.contrastive, sizes=EQUAL, **PERHAPS),
    Case("over-its-mean", models.mlp, loss=models.over_its_mean, **PERHAPS),
    Case("over-its-mean-equal", models.mlp, loss=models.over_its_mean, sizes=EQUAL, **PERHAPS),
    Case("label-smoothing", models.mlp, loss=models.smoothed, dense=None),
    Case(
        "label-smoothing-module",
        models.mlp,
        loss=nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
        dense=None,
    ),
    Case("class-weights", models.mlp, loss=models.weighted_classes, dense=None),
    Case(
        "regression",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)),
        labels="numbers",
        loss=models.squares,
        dense=None,
    ),
    Case("several-labels", models.mlp, labels="many", loss=models.several_labels, dense=None),
]

MIXING = [
    Case("mixing", models.two_layers(models.mixing_always), batched=None),
    Case("mixing-in-training", models.two_layers(models.mixing_in_training), batched=None),
    Case(
        "mixing-in-training-equal",
        models.two_layers(models.mixing_in_training),
        sizes=EQUAL,
        batched=None,
    ),
    Case("mixing-short-batches", models.two_layers(models.mixing_short_batches), batched=None),
    Case("mixing-long-batches", models.two_layers(models.mixing_long_batches), batched=None),
    Case("by-batch-size", models.two_layers(models.by_batch_size), batched=None),
    Case("softmax-over-batch", models.two_layers(models.softmax_over_batch), batched=None),
    Case("mixing-behind-zeros", models.behind_zeros, batched=None),
    Case(
        "one-by-one-in-training", models.OneByOne, "images", batched=None, threads=None, large=True
    ),
]

CALLS = [
    Case("replaced-forward", models.replaced_forward, batched=None, threads=None, dense=None),
    Case("closure-forward", models.closure_forward, **PERHAPS),
    Case("forward-hook", models.forward_hook, **PERHAPS),
    Case("forward-pre-hook", models.forward_pre_hook, **PERHAPS),
    Case("full-backward-hook", models.backward_hook, **PERHAPS),
    Case("full-backward-pre-hook", models.backward_pre_hook, **PERHAPS),
    Case("weight-hook", models.weight_hook, **PERHAPS),
]

BUFFERS = [
    Case("integer-buffers", models.Counting),
    Case("rebound-buffers", models.Rebinding),
    Case("constant-buffers", models.constants),
    Case("shared-buffer", models.SharedBuffer, batched=None),
    Case("norm-kept-in-eval", models.KeptInEval),
]

CONTROL = [
    Case("experts-boolean", partial(models.Experts, False), batched=False),
    Case("experts-dense", partial(models.Experts, True)),
    Case("if-on-data", models.two_layers(models.by_sign), batched=False),
    Case("while-on-data", models.two_layers(models.by_norm), batched=False),
    Case("double-backward", models.two_layers(models.slope), batched=None),
    Case("checkpoint", models.two_layers(models.in_checkpoint), batched=None),
    Case("own-function", models.with_function(models.Halved), batched=None),
    Case("own-function-batched", models.with_function(models.HalvedBatched)),
]

RANDOM = [
    Case(
        "dropout",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)),
        dense=None,
        draws=True,
        redraws=True,
    ),
    Case(
        "functional-dropout",
        models.two_layers(models.functional_dropout),
        batched=None,
        threads=None,
    ),
    Case("noise", models.two_layers(models.noisy), batched=None, threads=None),
]

GROUPS = (
    PLAIN, CONVOLUTIONS, SEQUENCES, WEIGHTS, LOSSES, MIXING, CALLS, BUFFERS, CONTROL, RANDOM,
)  # fmt: skip
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group)


# What must be refused in one line -------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A model, loss or batch that no engine can train as it is meant.

    Args:
        name: identifies it.
        build: makes the model; an error may be raised as soon as it is given to an objective.
        words: a pattern that the error's one line must contain.
        loss, data, labels, sizes: as in `Case`.
    """

    name: str
    build: Build
    words: str
    loss: Loss | None = None
    data: str = "vectors"
    labels: str = "classes"
    sizes: tuple[int, ...] = UNEQUAL


REFUSED: tuple[Refused, ...] = (
    Refused("lazy", lambda: nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 3)), "(?i)lazy"),
    Refused("sparse-embedding", models.of_words(sparse=True), "sparse", data="tokens"),
    Refused("sparse-bag", models.of_bags(sparse=True), "sparse", data="tokens"),
    Refused("mixed-types", models.mixed_types, "float64.*float32|float32.*float64"),
    Refused("old-weight-norm", models.old_weight_norm, "weight_norm"),
    Refused("batch-of-one", models.batch_norm, r"client 1\b", sizes=(8, 5, 8)),
    Refused("broadcast-output", models.one_number, "shape", loss=models.difference),  # [n, 1] - [n]
    Refused(
        "broadcast-labels", models.flat_number, "shape", loss=models.difference, labels="numbers"
    ),
)
