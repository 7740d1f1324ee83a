"""The models and losses of the engine zoo, tiny and unusual, in the order of its tables.

Nothing here knows the package: both the engines and plain torch train them.
"""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, CLASSES, WORDS, LENGTH = 6, 3, 11, 5  # of vectors, scores, vocabularies and series

Build = Callable[[], nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]


# Losses ---------------------------------------------------------------------------------------


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none")


def centred(output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output - output.mean(0), y)


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """Pull the outputs of a class together, and those of different classes apart."""
    unit = F.normalize(output, dim=1)
    log_share = F.log_softmax(unit @ unit.t() / 0.5, dim=1)
    same = (y[:, None] == y).to(output.dtype)
    return -(log_share * same).sum(1) / same.sum(1)


def over_its_mean(output: Tensor, y: Tensor) -> Tensor:
    losses = cross_entropy(output, y)
    return losses / (0.5 + losses.mean())


def squares(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y, reduction="none")


def smoothed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, y, reduction="none", label_smoothing=0.1)


def weighted_classes(output: Tensor, y: Tensor) -> Tensor:
    weight = torch.tensor([0.5, 1.0, 2.0]).to(output)
    return F.cross_entropy(output, y, weight=weight, reduction="none")


def several_labels(output: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, y, reduction="none")


# Building blocks ------------------------------------------------------------------------------


class Called(nn.Module):
    """A module whose forward pass is a function of it and of the input."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def mlp(activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 8, bias=bias), activation(), nn.Linear(8, CLASSES, bias=bias)
    )


def on_images(*layers: nn.Module, channels: int = 4) -> nn.Module:
    """Classify the mean over the pixels of what the layers make of an image."""
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)
    )


def conv(inputs: int = 2, outputs: int = 4, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **options)


def of_last(recurrent: Callable[..., nn.Module], **options: Any) -> Build:
    """Classify a series by the last output of a recurrent layer."""

    def build() -> nn.Module:
        width = options.get("proj_size", 6) * (2 if options.get("bidirectional") else 1)
        return Called(
            lambda m, x: m.head(m.cell(x)[0][:, -1]),
            cell=recurrent(4, 6, batch_first=True, **options),
            head=nn.Linear(width, CLASSES),
        )

    return build


def by_cell(cell: Callable[[int, int], nn.Module]) -> Build:
    """Classify a series by the state of a cell that is called step by step."""

    def run(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            state = m.cell(x[:, t], state)
        return m.head(state[0] if isinstance(state, tuple) else state)

    return lambda: Called(run, cell=cell(4, 6), head=nn.Linear(6, CLASSES))


class Residual(nn.Module):
    """Two convolutions with a normalisation each, beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(inputs, outputs, padding=1, bias=False), norm(outputs), nn.ReLU(inplace=True),
            conv(outputs, outputs, padding=1, bias=False), norm(outputs),
        )  # fmt: skip
        self.shortcut = nn.Identity() if inputs == outputs else conv(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Attention(nn.Module):
    """Self-attention by `scaled_dot_product_attention`, with its mask in a buffer or none."""

    mask: Tensor

    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Linear(8, CLASSES)
        self.masked = mask
        if mask:
            future = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
            self.register_buffer("mask", future)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = self.mask if self.masked else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


class CausalMask(nn.Module):
    """A causal mask of -inf in a float buffer, added to scores by hand; one label per token."""

    future: Tensor

    def __init__(self, outputs: int = WORDS, each: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, outputs)
        self.each = each
        self.register_buffer("future", torch.full((LENGTH, LENGTH), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        scores = self.query(h) @ self.key(h).mT / 8**0.5 + self.future
        out = self.head(scores.softmax(-1) @ h)
        return out.mT if self.each else out.mean(1)


def transformer(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=8, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return Called(lambda m, x: m.head(m.layer(x).mean(1)), layer=layer, head=nn.Linear(4, CLASSES))


def causal_transformer() -> nn.Module:
    """Scores for every token by two layers that see no later one, [n, classes, tokens]."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.embed(x) + m.position(torch.arange(x.shape[1], device=x.device).expand_as(x))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, h.dtype)
        return m.head(m.encoder(h, mask, is_causal=True)).mT

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return Called(
        run,
        embed=nn.Embedding(WORDS, 8),
        position=nn.Embedding(LENGTH, 8),
        encoder=nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False),
        head=nn.Linear(8, CLASSES),
    )


def time_first() -> nn.Module:
    """Classify a series by a transformer layer that takes the time first."""
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=0.0)
    return Called(
        lambda m, x: m.head(m.layer(x.transpose(0, 1))[-1]), layer=layer, head=nn.Linear(4, CLASSES)
    )


def crossing() -> nn.Module:
    """The words of a text attend to embeddings of their own."""

    def run(m: Any, x: Tensor) -> Tensor:
        memory = m.memory(x)
        return m.head(m.attend(m.embed(x), memory, memory)[0].mean(1))

    return Called(
        run,
        embed=nn.Embedding(WORDS, 8),
        memory=nn.Embedding(WORDS, 8),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, CLASSES),
    )


def next_words(cell: Callable[..., nn.Module], **options: Any) -> Build:
    """Scores for every token by a recurrent layer on embeddings, [n, classes, tokens]."""
    return lambda: Called(
        lambda m, x: m.head(m.cell(m.embed(x))[0]).mT,
        embed=nn.Embedding(WORDS, 4),
        cell=cell(4, 6, batch_first=True, **options),
        head=nn.Linear(12 if options.get("bidirectional") else 6, CLASSES),
    )


def in_steps() -> nn.Module:
    """Calls a recurrent layer step by step, with its own state."""

    def run(m: Any, x: Tensor) -> Tensor:
        state: Any = None
        for t in range(x.shape[1]):
            _, state = m.cell(x[:, t : t + 1], state)
        return m.head(state[0])

    return Called(run, cell=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, CLASSES))


def multihead() -> nn.Module:
    return Called(
        lambda m, x: m.head(m.attend(x, x, x, need_weights=False)[0].mean(1)),
        attend=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, CLASSES),
    )


def tied() -> nn.Module:
    """Scores every word by its embedding: encoder and decoder share one weight."""
    embed, decode = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False)
    decode.weight = embed.weight
    return Called(
        lambda m, x: m.decode(torch.tanh(m.middle(m.embed(x)).mean(1))),
        embed=embed,
        middle=nn.Linear(6, 6),
        decode=decode,
    )


def frozen(part: str) -> nn.Module:
    """A network of which some weights are not trained."""
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(part))
    return model


def aliased() -> nn.Module:
    """One module under two names."""
    encoder = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU())
    return Called(
        lambda m, x: m.net(x) + 0.1 * m.encoder(x)[:, :CLASSES],
        encoder=encoder,
        net=nn.Sequential(encoder, nn.Linear(8, CLASSES)),
    )


def twice() -> nn.Module:
    """One layer twice in a sequence."""
    middle = nn.Linear(8, 8)
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), middle, nn.Tanh(), middle, nn.Linear(8, CLASSES)
    )


def one_activation() -> nn.Module:
    """One activation without weights twice in a sequence."""
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(WIDTH, 8), act, nn.Linear(8, 8), act, nn.Linear(8, CLASSES))


# Mixing of examples ---------------------------------------------------------------------------


def mixing_in_training(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(h - h.mean(0) if m.training else h)


def mixing_always(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x - x.mean(0))))


def behind_zeros() -> nn.Module:
    """Examples are mixed behind a layer that starts at zero, so that at first nothing shows."""
    gate = nn.Linear(8, 8)
    nn.init.zeros_(gate.weight)
    nn.init.zeros_(gate.bias)

    def run(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.first(x))
        return m.last(h + m.gate(3 * h).mean(0))

    return Called(run, first=nn.Linear(WIDTH, 8), gate=gate, last=nn.Linear(8, CLASSES))


def two_layers(run: Callable[[Any, Tensor], Tensor], **more: Any) -> Build:
    return lambda: Called(run, first=nn.Linear(WIDTH, 8), last=nn.Linear(8, CLASSES), **more)


def mixing_short_batches(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(h - h.mean(0) if len(x) < 4 else h)


def mixing_long_batches(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(h - h.roll(1, 0) if len(x) > 3 else h)


def by_batch_size(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(m.first(x)) * 4 / len(x))


def softmax_over_batch(m: Any, x: Tensor) -> Tensor:
    return m.last(8 * torch.softmax(m.first(x), dim=0))


class OneByOne(nn.Module):
    """Calls the layers of its sequence one by one, but in training only. Large enough for threads.

    Between a ReLU and a maximum it changes the sign: who swaps the two gets other numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            conv(2, 64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 400), nn.ReLU()
        )
        self.head = nn.Linear(400, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.head(self.net(x))
        for layer in self.net:
            x = -layer(x) if isinstance(layer, nn.ReLU) else layer(x)
        return self.head(x)


# Replaced calls and hooks ---------------------------------------------------------------------


def halved(module: nn.Module, *gradients: Any) -> tuple[Tensor]:
    """Return half of the first gradient: as a hook of the backward pass, or before it."""
    return (gradients[0][0] * 0.5,)


def replaced_forward() -> nn.Module:
    """A dense network of which one layer has another `forward`."""
    model = mlp()
    layer = model.get_submodule("0")
    layer.forward = types.MethodType(lambda self, x: 2 * F.linear(x, self.weight, self.bias), layer)
    return model


def closure_forward() -> nn.Module:
    """The same by a closure, which a copy of the model would share with the original."""
    model = mlp()
    layer = model.get_submodule("0")
    assert isinstance(layer, nn.Linear)
    setattr(layer, "forward", lambda x: 2 * F.linear(x, layer.weight, layer.bias))  # noqa: B010
    return model


def forward_hook() -> nn.Module:
    model = mlp()
    model.get_submodule("0").register_forward_hook(lambda m, args, out: out * 1.5)
    return model


def forward_pre_hook() -> nn.Module:
    model = mlp()
    model.get_submodule("2").register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    return model


def backward_hook() -> nn.Module:
    model = mlp()
    model.get_submodule("1").register_full_backward_hook(halved)
    return model


def backward_pre_hook() -> nn.Module:
    model = mlp()
    model.get_submodule("1").register_full_backward_pre_hook(halved)
    return model


def weight_hook() -> nn.Module:
    model = mlp()
    weight = model.get_parameter("0.weight")
    weight.register_hook(lambda grad: grad * 0.5)
    return model


# Buffers --------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls in integer buffers, in place, and computes with them."""

    calls: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.seen += len(x)
        return self.net(x) * (1 + 0.1 * self.calls)


class Rebinding(nn.Module):
    """Puts new tensors in the place of its buffers, a running mean among them."""

    calls: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.Tanh)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls = self.calls + 1
            self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return self.net(x - self.running) / (1 + 0.1 * self.calls)


class Reader(nn.Module):
    """Subtracts a buffer that another module updates."""

    running: Tensor

    def __init__(self, running: Tensor) -> None:
        super().__init__()
        self.register_buffer("running", running)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.running


class SharedBuffer(nn.Module):
    """One running mean that two modules hold: the first updates it, the second reads it."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(WIDTH))
        self.shift = Reader(self.running)
        self.net = mlp(nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.running.mul_(0.8).add_(0.2 * x.detach().mean(0))
        return self.net(self.shift(x))


class KeptInEval(nn.Module):
    """A pretrained normalisation that stays in evaluation mode while the rest is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.net = mlp()

    def train(self, mode: bool = True) -> KeptInEval:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


def constants() -> nn.Module:
    """Buffers that never change: a truth value for each input, bytes, and a scale."""
    model = two_layers(lambda m, x: m.last(torch.tanh(m.first(x * m.mask / m.bytes) * m.scale)))()
    model.register_buffer("mask", torch.arange(WIDTH) % 3 > 0)
    model.register_buffer("bytes", torch.tensor(2, dtype=torch.uint8))
    model.register_buffer("scale", torch.tensor(1.5), persistent=False)
    return model


# Parametrisations and parameters outside layers -----------------------------------------------


def parametrised(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def symmetric(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Bare(nn.Module):
    """Parameters of its own, in a list and in a dictionary; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ParameterList([0.3 * torch.randn(WIDTH, 8), 0.3 * torch.randn(8, CLASSES)])
        self.shifts = nn.ParameterDict({"in": torch.zeros(8), "out": torch.zeros(CLASSES)})
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.scale * x @ self.blocks[0] + self.shifts["in"])
        return h @ self.blocks[1] + self.shifts["out"]


def cosine(m: Any, x: Tensor) -> Tensor:
    """Score by the angle to each class: the layer's weight is used, its forward pass is not."""
    h = F.normalize(torch.tanh(m.first(x)), dim=1)
    return 4 * F.linear(h, F.normalize(m.last.weight, dim=1))


def by_weight_norm(m: Any, x: Tensor) -> Tensor:
    """Divide by the norm of all weights of a layer: a single number per model."""
    return m.last(torch.tanh(m.first(x))) / m.last.weight.norm()


# Control flow and autograd --------------------------------------------------------------------


class Experts(nn.Module):
    """Sends each example to the expert that its gate prefers, by boolean indexing."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(2)])
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        if self.dense:
            outputs = torch.stack([expert(x) for expert in self.experts], dim=1)
            return (shares[:, :, None] * outputs).sum(1)
        out = x.new_zeros(len(x), CLASSES)
        for k, expert in enumerate(self.experts):
            chosen = shares.argmax(1) == k
            out[chosen] = shares[chosen, k, None] * expert(x[chosen])
        return out


def by_sign(m: Any, x: Tensor) -> Tensor:
    h = m.first(x)
    return m.last(torch.tanh(h) if x.sum() > 0 else torch.sigmoid(h))


def by_norm(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    while h.norm() > 2:
        h = h * 0.7
    return m.last(h)


def slope(m: Any, x: Tensor) -> Tensor:
    """Add the gradient of a part with respect to its input: the loss differentiates it again."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        out = m.last(torch.tanh(m.first(x)))
        (inner,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out + 0.1 * inner[:, :CLASSES]


def in_checkpoint(m: Any, x: Tensor) -> Tensor:
    return m.last(checkpoint(lambda h: torch.tanh(m.first(h)), x, use_reentrant=False))


class Halved(torch.autograd.Function):
    """The square, with half of its gradient; nothing tells how to batch it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return error * x


class HalvedBatched(torch.autograd.Function):
    """The same in the form that `torch.func` can batch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return error * x


def with_function(function: type[torch.autograd.Function]) -> Build:
    return two_layers(lambda m, x: m.last(function.apply(m.first(x))))


# Shapes of computation ------------------------------------------------------------------------


def squeezed() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = F.relu(m.conv(x))
        gate = torch.sigmoid(m.up(F.relu(m.down(h.mean((2, 3))))))
        return m.head((h * gate[:, :, None, None]).mean((2, 3)))

    return Called(
        run,
        conv=conv(),
        down=nn.Linear(4, 2),
        up=nn.Linear(2, 4),
        head=nn.Linear(4, CLASSES),
    )


def spectral(m: Any, x: Tensor) -> Tensor:
    waves = torch.fft.rfft(m.first(x), dim=1)
    return m.last(torch.fft.irfft(waves * waves.conj(), n=8, dim=1))


def by_einsum(m: Any, x: Tensor) -> Tensor:
    return m.last(torch.tanh(torch.einsum("bi,oi->bo", x, m.first.weight) + m.first.bias))


def unfolded() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, stride=3)
        return m.head(F.relu(m.patch(columns.mT)).mean(1))

    return Called(run, patch=nn.Linear(18, 6), head=nn.Linear(6, CLASSES))


def bilinear() -> nn.Module:
    return Called(lambda m, x: m.pair(x[:, :3], x[:, 3:]), pair=nn.Bilinear(3, 3, CLASSES))


def of_bags(**options: Any) -> Build:
    return lambda: nn.Sequential(
        nn.EmbeddingBag(WORDS, 6, **options), nn.ReLU(), nn.Linear(6, CLASSES)
    )


def of_words(**options: Any) -> Build:
    return lambda: Called(
        lambda m, x: m.head(torch.tanh(m.embed(x)).mean(1)),
        embed=nn.Embedding(WORDS, 6, **options),
        head=nn.Linear(6, CLASSES),
    )


def channels_last() -> nn.Module:
    model: Any = on_images(conv(), nn.ReLU(), conv(4, 4), nn.ReLU())
    return model.to(memory_format=torch.channels_last)


def input_in_place(m: Any, x: Tensor) -> Tensor:
    """Scale the input where it is stored, as code that knows its batches to be copies does."""
    return m.last(torch.tanh(m.first(x.mul_(0.5))))


def functional_dropout(m: Any, x: Tensor) -> Tensor:
    return m.last(F.dropout(torch.tanh(m.first(x)), 0.3, training=m.training))


def noisy(m: Any, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return m.last(h + 0.5 * torch.rand(h.shape).to(h) if m.training else h)


def token_scores() -> nn.Module:
    """Scores for every token, [n, classes, tokens]."""
    return Called(
        lambda m, x: m.head(torch.tanh(m.embed(x))).mT,
        embed=nn.Embedding(WORDS, 6),
        head=nn.Linear(6, CLASSES),
    )


# What must be refused ---------------------------------------------------------------------------


def mixed_types() -> nn.Module:
    return Called(
        lambda m, x: m.last(torch.tanh(m.first(x.double())).float()),
        first=nn.Linear(WIDTH, 8).double(),
        last=nn.Linear(8, CLASSES),
    )


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        return parametrised(torch.nn.utils.weight_norm)


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))


def one_number() -> nn.Module:
    return nn.Linear(WIDTH, 1)


def flat_number() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0))


def difference(output: Tensor, y: Tensor) -> Tensor:
    return (output - y.to(output.dtype)) ** 2
