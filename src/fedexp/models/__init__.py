"""The paper's models. They are plain `nn.Module`s, and any module of yours works as well."""

from fedexp.models.cnn import cifar_cnn, emnist_cnn
from fedexp.models.dense import logistic, mlp
from fedexp.models.resnet import resnet18

__all__ = ["cifar_cnn", "emnist_cnn", "logistic", "mlp", "resnet18"]
