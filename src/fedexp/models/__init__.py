"""The paper's models. They are plain `nn.Module`s, and any module of yours works as well."""

from collections.abc import Callable

from torch import nn

from fedexp.models.cnn import cifar_cnn, emnist_cnn
from fedexp.models.dense import logistic, mlp
from fedexp.models.resnet import resnet18

__all__ = ["MODELS", "cifar_cnn", "emnist_cnn", "logistic", "mlp", "resnet18"]

# For the edge that has names instead of functions: the command line.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "emnist-cnn": emnist_cnn,
    "cifar-cnn": cifar_cnn,
    "resnet18": resnet18,
    "logistic": logistic,
    "mlp": mlp,
}
