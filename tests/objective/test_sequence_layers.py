"""Stacked sequence layers against torch's own, one client after another, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedexp.kernels.layers import gradient_buffers
from fedexp.objective.stack import CannotStackError, computes_exactly, stacked

CLIENTS, BATCH, TIME, WIDTH, HIDDEN, WORDS = 3, 4, 5, 6, 8, 11
Call = Callable[[nn.Module, Tensor], Any]

torch.manual_seed(0)  # of the masks below


def series() -> Tensor:
    return torch.randn(CLIENTS * BATCH, TIME, WIDTH, dtype=torch.float64)


def tokens() -> Tensor:
    return torch.randint(0, WORDS, (CLIENTS * BATCH, TIME))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of nested results; None is left out."""
    if isinstance(value, Tensor):
        return [value]
    return [t for each in value if each is not None for t in tensors(each)]


def assert_stacks(
    build: Callable[[], nn.Module],
    x: Tensor,
    call: Call = lambda m, x: m(x),
    training: bool = True,
    dims: int = 0,
) -> None:
    """Assert that results and gradients are those of every client's own module.

    Args:
        build: makes the module.
        x: the inputs of all clients, batch first.
        call: returns the results of a module.
        training: the mode.
        dims: the dimension of the examples in all results.
    """
    torch.manual_seed(1)
    modules = [build().double().train(training) for _ in range(CLIENTS)]
    model = stacked(modules[0]).train(training)
    weights = {
        name: torch.stack([m.get_parameter(name).detach() for m in modules]).requires_grad_()
        for name, _ in modules[0].named_parameters()
    }
    x = x.clone().requires_grad_() if x.is_floating_point() else x
    inputs = [
        part.detach().requires_grad_() if x.is_floating_point() else part for part in x.split(BATCH)
    ]
    expected = [tensors(call(m, own)) for m, own in zip(modules, inputs, strict=True)]
    found = tensors(torch.func.functional_call(_Caller(model, call), _prefixed(weights), (x,)))
    assert len(found) == len(expected[0])
    pulls = [torch.randn_like(value) for value in found]
    for value, *own in zip(found, *expected, strict=True):
        torch.testing.assert_close(value, torch.cat(own, dim=dims))
    buffers = [torch.empty_like(w) for w in weights.values()]
    leaves = [*weights.values(), *([x] if x.is_floating_point() else [])]
    with gradient_buffers(list(weights.values()), buffers):
        grads = torch.autograd.grad(found, leaves, pulls)
    split = [pull.split(BATCH, dim=dims) for pull in pulls]
    for client, module in enumerate(modules):
        own = [pull[client] for pull in split]
        leaves = [*module.parameters(), *([inputs[client]] if x.is_floating_point() else [])]
        exact = torch.autograd.grad(expected[client], leaves, own)
        parts = [*(g[client] for g in grads[: len(weights)])]
        parts += [g.split(BATCH)[client] for g in grads[len(weights) :]]
        for part, value in zip(parts, exact, strict=True):
            torch.testing.assert_close(part, value)


class _Caller(nn.Module):
    """A module that is called by a function."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.module, x)


def _prefixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": weight for name, weight in weights.items()}


@pytest.mark.parametrize("padding", [None, 0, -2])
def test_embedding(padding: int | None) -> None:
    assert_stacks(lambda: nn.Embedding(WORDS, WIDTH, padding_idx=padding), tokens())
    assert_stacks(lambda: nn.Embedding(WORDS, WIDTH, padding_idx=padding), tokens()[:, 0])


@pytest.mark.parametrize("index", [-1, WORDS])
def test_an_index_of_no_word_is_refused(index: int) -> None:
    """As by `nn.Embedding`, which takes no index from the end either."""
    layer = nn.Embedding(WORDS, WIDTH)
    weight, wrong = layer.weight.detach().repeat(CLIENTS, 1, 1), tokens()
    wrong[CLIENTS] = index
    with pytest.raises((IndexError, RuntimeError)):
        torch.func.functional_call(stacked(layer), {"weight": weight}, (wrong,))
    right = torch.func.functional_call(stacked(layer), {"weight": weight}, (tokens().int(),))
    assert right.shape == (CLIENTS * BATCH, TIME, WIDTH)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(WIDTH,), (TIME, WIDTH)])
def test_layer_norm(bias: bool, shape: tuple[int, ...]) -> None:
    def build() -> nn.Module:
        layer = nn.LayerNorm(shape, bias=bias)
        nn.init.normal_(layer.weight)
        return layer

    assert_stacks(build, series())


RECURRENT = [nn.LSTM, nn.GRU, nn.RNN, lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 3, "bidirectional": True, "bias": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", RECURRENT, ids=["lstm", "gru", "rnn", "rnn-relu"])
def test_recurrent_layers(layer: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    assert_stacks(
        lambda: layer(WIDTH, HIDDEN, batch_first=True, **options), series(), lambda m, x: m(x)[0]
    )
    # the last states, which have the examples second
    assert_stacks(
        lambda: layer(WIDTH, HIDDEN, batch_first=True, **options),
        series(),
        lambda m, x: m(x)[1],
        dims=1,
    )
    assert_stacks(
        lambda: layer(WIDTH, HIDDEN, **options), series(), lambda m, x: m(x.transpose(0, 1)), dims=1
    )


@pytest.mark.parametrize("layer", RECURRENT, ids=["lstm", "gru", "rnn", "rnn-relu"])
def test_initial_states_of_recurrent_layers(layer: Callable[..., nn.Module]) -> None:
    """The states depend on the input, so that their gradients are compared as well."""

    def call(m: nn.Module, x: Tensor) -> Any:
        h = torch.stack([x.mean(1), x.std(1), x[:, 0], x[:, 1]])
        first = (h, h.sin()) if isinstance(m, nn.LSTM) else h
        y, last = m(x, first)
        return y.transpose(0, 1), last

    assert_stacks(
        lambda: layer(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True),
        series(),
        call,
        dims=1,
    )


def test_a_layer_that_is_called_step_by_step() -> None:
    def call(m: Any, x: Tensor) -> Any:
        m.flatten_parameters()
        state, outputs = None, []
        for t in range(TIME):
            y, state = m(x[:, t : t + 1], state)
            outputs.append(y)
        return torch.cat(outputs, dim=1)

    assert_stacks(lambda: nn.LSTM(WIDTH, HIDDEN, batch_first=True), series(), call)


def test_dropout_between_recurrent_layers() -> None:
    x, p = series(), 0.5
    module = nn.LSTM(WIDTH, 64, num_layers=2, dropout=p, batch_first=True).double()
    model = stacked(module)
    weights = {n: w.detach().expand(CLIENTS, *w.shape) for n, w in module.named_parameters()}

    def outputs() -> Tensor:
        return torch.func.functional_call(model, weights, (x,))[0]

    model.eval()
    torch.testing.assert_close(outputs(), module.eval()(x)[0])
    model.train()
    one, other = outputs(), outputs()
    assert not torch.equal(one, other)
    torch.manual_seed(2)
    found = torch.stack([outputs() for _ in range(200)])
    module.train()
    torch.manual_seed(3)
    expected = torch.stack([module(x)[0].detach() for _ in range(200)])
    assert (found.mean(0) - expected.mean(0)).norm() < 0.15 * expected.mean(0).norm()
    assert found.std(0).mean() == pytest.approx(float(expected.std(0).mean()), rel=0.05)


MASK = torch.randn(TIME, TIME, dtype=torch.float64)
CAUSAL = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)


def heads_mask(x: Tensor) -> Tensor:
    """Return a mask for each example and head, which depends on the example."""
    scores = x.detach()[:, :, :1] * x.detach()[:, None, :, 1]
    return scores.repeat_interleave(2, dim=0)


def padding_mask(x: Tensor) -> Tensor:
    mask = x.detach()[:, :, 0] > 0.5
    mask[:, 0] = False
    return mask


ATTENTION: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda x: {},
    "no-weights": lambda x: {"need_weights": False},
    "weights-of-heads": lambda x: {"average_attn_weights": False},
    "mask": lambda x: {"attn_mask": MASK},
    "causal": lambda x: {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "causal-weights": lambda x: {"attn_mask": CAUSAL, "is_causal": True},
    "mask-of-heads": lambda x: {"attn_mask": heads_mask(x), "need_weights": False},
    "padding": lambda x: {"key_padding_mask": padding_mask(x)},
    "both": lambda x: {
        "key_padding_mask": padding_mask(x), "attn_mask": CAUSAL, "need_weights": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", ATTENTION)
def test_self_attention(options: str, bias: bool, training: bool) -> None:
    def call(m: nn.Module, x: Tensor) -> Any:
        return m(x, x, x, **ATTENTION[options](x))

    def build() -> nn.Module:
        layer = nn.MultiheadAttention(WIDTH, 2, bias=bias, batch_first=True)
        if bias:
            nn.init.normal_(layer.in_proj_bias)
        return layer

    assert_stacks(build, series(), call, training)


@pytest.mark.parametrize("sizes", [{}, {"kdim": 3, "vdim": 2}])
def test_cross_attention(sizes: dict[str, int]) -> None:
    def call(m: nn.Module, x: Tensor) -> Any:
        key = x[:, 1:, : sizes.get("kdim", WIDTH)]
        return m(x, key, x[:, 1:, -sizes.get("vdim", WIDTH) :])

    assert_stacks(
        lambda: nn.MultiheadAttention(WIDTH, 3, batch_first=True, **sizes), series(), call
    )


def test_attention_with_time_first() -> None:
    def call(m: nn.Module, x: Tensor) -> Any:
        x = x.transpose(0, 1)
        return m(x, x[1:], x[1:], need_weights=False)[0]

    assert_stacks(lambda: nn.MultiheadAttention(WIDTH, 2), series(), call, dims=1)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder_layer(
    activation: str, batch_first: bool, norm_first: bool, training: bool
) -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(
            WIDTH, 2, 16, dropout=0.0, activation=activation, batch_first=batch_first,
            norm_first=norm_first,
        )  # fmt: skip

    def call(m: nn.Module, x: Tensor) -> Any:
        mask = padding_mask(x)
        x = x if batch_first else x.transpose(0, 1)
        return m(x), m(x, src_key_padding_mask=mask), m(x, CAUSAL)

    assert_stacks(build, series(), call, training, dims=0 if batch_first else 1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder(batch_first: bool, training: bool) -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH))
        for weight in model.parameters():  # the copies of a layer start alike
            nn.init.normal_(weight, std=0.5)
        return model

    def call(m: nn.Module, x: Tensor) -> Any:
        x = x if batch_first else x.transpose(0, 1)
        return m(x), m(x, CAUSAL, is_causal=True)

    assert_stacks(build, series(), call, training, dims=0 if batch_first else 1)


@pytest.mark.parametrize("training", [False, True])
def test_transformer_decoder_layer_of_stacked_parts(training: bool) -> None:
    assert_stacks(
        lambda: nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True),
        series(),
        lambda m, x: m(x, x[:, 1:], tgt_mask=CAUSAL, tgt_is_causal=True),
        training,
    )


def test_dropout_in_attention_is_off_in_evaluation_only() -> None:
    x = series()
    module = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.3, batch_first=True).double()
    model = stacked(module)
    weights = {n: w.detach().expand(CLIENTS, *w.shape) for n, w in module.named_parameters()}
    model.eval()
    once = torch.func.functional_call(model, weights, (x,))
    torch.testing.assert_close(once, module.eval()(x))
    model.train()
    one, other = (torch.func.functional_call(model, weights, (x,)) for _ in range(2))
    assert not torch.equal(one, other)


def test_sequence_layers_compute_in_bf16_around_exact_norms() -> None:
    module = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))
    assert [computes_exactly(module, n) for n, _ in module.named_parameters()] == [
        False, True, True, False, False,
    ]  # fmt: skip
    model = stacked(module)
    weights = {
        n: w.detach().expand(CLIENTS, *w.shape).to(torch.float32 if "1." in n else torch.bfloat16)
        for n, w in module.named_parameters()
    }
    x = tokens()
    y = torch.func.functional_call(model, weights, (x,))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), module(x), atol=0.05, rtol=0.05)


def test_what_has_no_stacked_implementation() -> None:
    for module, reason in (
        (nn.Embedding(3, 4, max_norm=1.0), "max_norm"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), "scale_grad_by_freq"),
        (nn.Embedding(3, 4, sparse=True), "sparse"),
        (nn.LSTM(3, 4, proj_size=2), "projections"),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), "add_bias_kv"),
        (nn.MultiheadAttention(4, 2, add_zero_attn=True), "add_zero_attn"),
    ):
        with pytest.raises(CannotStackError, match=reason):
            stacked(module)


def test_packed_sequences_are_refused_when_they_come() -> None:
    module = nn.GRU(WIDTH, HIDDEN, batch_first=True).double()
    weights = {n: w.detach().expand(CLIENTS, *w.shape) for n, w in module.named_parameters()}
    lengths = torch.full((CLIENTS * BATCH,), TIME)
    packed = nn.utils.rnn.pack_padded_sequence(series(), lengths, batch_first=True)
    with pytest.raises(TypeError, match="packed"):
        torch.func.functional_call(stacked(module), weights, (packed,))
