"""Small convolutional networks: the one for EMNIST and the one for CIFAR.

Weights are drawn as torch draws them by default, as in the authors' code.
"""

from __future__ import annotations

from torch import nn


def emnist_cnn(classes: int = 62) -> nn.Sequential:
    """The EMNIST network of Reddi et al. (2021), for images [N, 1, 28, 28].

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
    """The CIFAR network in the manner of McMahan et al. (2017), for images [N, 3, 32, 32].

    Two 5x5 convolutions without padding (32 and 64 channels), each with 2x2 max-pooling, down to
    5x5; then 384 and 192 hidden units (audit B15). It has 744,330 parameters at 10 classes. The
    paper gives no padding; this is the form whose first dense layer has 1,600 inputs.

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
