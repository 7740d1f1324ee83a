"""The paper's models, and three for text, as plain `nn.Module`s; any other module works as well.

Weights are initialised by torch's defaults, as in the authors' code. ResNet-18 has group instead of
batch normalisation: batch statistics of clients with different data do not average to anything
useful (Hsieh et al., 2020). The authors use GroupNorm with 2 groups
(docs/paper.md#released-resnet).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from fedexp.errors import require, whole_number


class GroupNormReLU(nn.GroupNorm):
    """relu(GroupNorm(x) + residual), as one layer so that an engine can fuse it.

    >>> import torch
    >>> GroupNormReLU(1, 2)(torch.tensor([[[[1.0]], [[3.0]]]])).flatten().tolist()
    [0.0, 0.99...]
    """

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        normalised = super().forward(input)
        return (normalised if residual is None else normalised + residual).relu()


def logistic(inputs: int, classes: int) -> nn.Sequential:
    """Return multinomial logistic regression: one linear layer on the flattened example.

    >>> sum(p.numel() for p in logistic(784, 10).parameters())
    7850
    """
    return mlp(inputs, (), classes)


def mlp(inputs: int, hidden: int | Sequence[int], classes: int) -> nn.Sequential:
    """Return a multi-layer perceptron with ReLU between its layers, on the flattened example.

    Args:
        inputs: numbers in an example, e.g. 784 for 28x28 pixels.
        hidden: units of the hidden layer, or of each of several.
        classes: number of outputs.

    >>> mlp(64, 32, 10)
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    widths = (inputs, *((hidden,) if isinstance(hidden, int) else hidden), classes)
    require(min(widths) >= 1, f"every layer needs at least one unit, but the widths are {widths}")
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU() if layers else nn.Flatten(), nn.Linear(before, after)]
    return nn.Sequential(*layers)


def emnist_cnn(classes: int = 62) -> nn.Sequential:
    """Return the EMNIST network of Reddi et al. (2021), for images [N, 1, 28, 28].

    Two 3x3 convolutions without padding (32 and 64 channels), 2x2 max-pooling to 12x12, dropout
    0.25, 128 hidden units, dropout 0.5. It has 1,206,590 parameters at 62 classes.

    Args:
        classes: number of outputs; 62 for digits, capitals and small letters.

    >>> sum(p.numel() for p in emnist_cnn().parameters())
    1206590
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 12 * 12, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def cifar_cnn(classes: int = 10) -> nn.Sequential:
    """Return a CIFAR network in the style of McMahan et al. (2017), for images [N, 3, 32, 32].

    Two 5x5 convolutions without padding (32 and 64 channels), each with 2x2 max-pooling, down to
    5x5; then 384 and 192 hidden units (docs/paper.md#released-cifar-cnn). It has 744,330 parameters
    at 10 classes. The paper does not state the padding; without any, the first dense layer has
    1,600 inputs.

    Args:
        classes: number of outputs.

    >>> sum(p.numel() for p in cifar_cnn().parameters())
    744330
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 5 * 5, 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


Pool = Literal["adaptive", "avg3"]
Stem = Literal["small", "imagenet"]
WIDTHS = (64, 128, 256, 512)


def resnet18(
    classes: int = 10, pool: Pool = "adaptive", groups: int = 2, stem: Stem = "small"
) -> nn.Sequential:
    """Return ResNet-18 (He et al., 2016), by default in the variant for images [N, 3, 32, 32].

    It begins with a 3x3 convolution and no pooling; four pairs of residual blocks follow, the
    last three pairs halving the resolution, down to 4x4. It has 11,173,962 parameters at 10
    classes.

    Args:
        classes: number of outputs.
        pool: "adaptive" averages the whole 4x4 map. "avg3" averages 3x3 windows, of which one
            fits: the last row and column are ignored, as in the authors' code
            (docs/paper.md#released-resnet).
        groups: groups of each GroupNorm; a divisor of 64.
        stem: "imagenet" begins with a 7x7 convolution and 3x3 max-pooling, each of stride 2, so
            that the last map of a 32x32 image has one pixel.

    >>> sum(p.numel() for p in resnet18().parameters())
    11173962
    """
    require(pool in get_args(Pool), f"pool must be one of {', '.join(get_args(Pool))}: {pool!r}")
    require(
        groups >= 1 and WIDTHS[0] % groups == 0,
        f"groups must divide the {WIDTHS[0]} channels of the first layer, but is {groups}",
    )
    require(stem in get_args(Stem), f"stem must be one of {', '.join(get_args(Stem))}: {stem!r}")
    first: list[nn.Module] = [_convolution(3, WIDTHS[0]), GroupNormReLU(groups, WIDTHS[0])]
    if stem == "imagenet":
        first[0] = nn.Conv2d(3, WIDTHS[0], kernel_size=7, stride=2, padding=3, bias=False)
        first.append(nn.MaxPool2d(kernel_size=3, stride=2, padding=1))
    blocks, channels = [], WIDTHS[0]
    for width in WIDTHS:
        blocks += [Residual(channels, width, groups), Residual(width, width, groups)]
        channels = width
    return nn.Sequential(
        *first,
        *blocks,
        nn.AdaptiveAvgPool2d(1) if pool == "adaptive" else nn.AvgPool2d(3),
        nn.Flatten(),
        nn.Linear(channels, classes),
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut: relu(f(x) + shortcut(x)).

    Where the number of channels changes, the block also halves the resolution, and its shortcut
    is a 1x1 convolution; else the shortcut is x itself.

    >>> import torch
    >>> Residual(4, 8, groups=2)(torch.zeros(1, 4, 6, 6)).shape
    torch.Size([1, 8, 3, 3])
    """

    def __init__(self, channels: int, width: int, groups: int) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.body = nn.Sequential(
            _convolution(channels, width, stride),
            GroupNormReLU(groups, width),
            _convolution(width, width),
        )
        self.join = GroupNormReLU(groups, width)
        self.shortcut: nn.Module = nn.Identity()
        if channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, kernel_size=1, stride=stride, bias=False),
                nn.GroupNorm(groups, width),
            )

    def forward(self, x: Tensor) -> Tensor:
        joined: Tensor = self.join(self.body(x), self.shortcut(x))
        return joined


def _convolution(channels: int, width: int, stride: int = 1) -> nn.Conv2d:
    """Return a 3x3 convolution without bias: the normalisation after it has one."""
    return nn.Conv2d(channels, width, kernel_size=3, stride=stride, padding=1, bias=False)


class CharLSTM(nn.Module):
    """Embedding, LSTM layers and a dense layer; scores of the next token at each position.

    Args:
        tokens: size of the vocabulary.
        embedding: width of the embedding.
        hidden: units of each LSTM layer.
        layers: number of LSTM layers.

    >>> CharLSTM(10, 4, 8, 1)(torch.zeros(2, 5, dtype=torch.long)).shape  # [N, tokens, length]
    torch.Size([2, 10, 5])
    """

    def __init__(self, tokens: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, tokens)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(x))
        scores: Tensor = self.head(states)
        return scores.transpose(1, 2)


def encoder_layer(width: int, heads: int) -> nn.TransformerEncoderLayer:
    """Return torch's transformer layer, with ReLU; it normalises first and has no dropout."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )


class GPTLayer(nn.Module):
    """Masked attention and a perceptron with GELU, each after a LayerNorm and with a shortcut.

    Attention is written as matrix products: on a CPU in bf16, a step with torch's fused attention
    takes 2.5 times as long, in float32 as long. Called as `nn.TransformerEncoderLayer` is.

    >>> later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    >>> GPTLayer(8, heads=2)(torch.zeros(1, 5, 8), later).shape
    torch.Size([1, 5, 8])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        require(
            heads >= 1 and width % heads == 0,
            f"heads must divide the width of the layers, {width}, but is {heads}",
        )
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # a key's bias changes no output: its gradient is rounding, which Adam scales to whole steps
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, src_mask: Tensor, is_causal: bool = True) -> Tensor:
        projected = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4)  # [N, heads, length, width / heads] each
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(src_mask, -torch.inf)
        mixed = scores.softmax(dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class CharTransformer(nn.Module):
    """A causal transformer with learned positions; scores of the next token at each position.

    Layers normalise first and have no dropout: a client sees each of its sequences once per round.

    Args:
        tokens: size of the vocabulary.
        length: longest sequence.
        width: width of the embedding and of the layers.
        heads: attention heads; a divisor of the width.
        layers: number of layers.
        layer: makes a layer of a width and a number of heads.

    >>> CharTransformer(10, 5, 8, 2, 1)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 10, 5])
    """

    def __init__(
        self,
        tokens: int,
        length: int,
        width: int,
        heads: int,
        layers: int,
        layer: Callable[[int, int], nn.Module] = encoder_layer,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        places = torch.arange(length, device=x.device).expand_as(x)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        states = self.embedding(x) + self.position(places)
        for layer in self.layers:
            states = layer(states, src_mask=later, is_causal=True)
        scores: Tensor = self.head(self.norm(states))
        return scores.transpose(1, 2)


def char_lstm(tokens: int = 90) -> CharLSTM:
    """Return the Shakespeare network of Reddi et al. (2021), for sequences of tokens [N, length].

    An embedding of width 8, two LSTM layers of 256 units and a dense layer. It has 822,570
    parameters at 90 tokens: 2,048 more than in Keras, whose LSTM has one bias where torch has two.

    >>> sum(p.numel() for p in char_lstm().parameters())
    822570
    """
    return CharLSTM(tokens, embedding=8, hidden=256, layers=2)


def char_transformer(tokens: int = 90, length: int = 80) -> CharTransformer:
    """Return a causal transformer of about the size of `char_lstm`: 4 layers, width 128, 4 heads.

    Args:
        tokens: size of the vocabulary.
        length: longest sequence.

    >>> sum(p.numel() for p in char_transformer().parameters())
    826714
    """
    return CharTransformer(tokens, length, width=128, heads=4, layers=4)


def tinygpt(
    tokens: int = 90, context: int = 64, width: int = 64, layers: int = 3, heads: int = 4
) -> CharTransformer:
    """Return a small GPT: a causal transformer with GELU, whose attention is plain products.

    Args:
        tokens: size of the vocabulary.
        context: longest sequence.
        width: width of the embedding and of the layers.
        layers: number of layers.
        heads: attention heads; a divisor of the width.

    >>> sum(p.numel() for p in tinygpt().parameters())
    165210
    """
    for name, number in {"width": width, "layers": layers, "heads": heads}.items():
        whole_number(name, number, 1)
    return CharTransformer(tokens, context, width, heads, layers, GPTLayer)


__all__ = [
    "char_lstm",
    "char_transformer",
    "cifar_cnn",
    "emnist_cnn",
    "logistic",
    "mlp",
    "resnet18",
    "tinygpt",
]
