"""Dense networks of many clients with the gradient written out, for a CPU.

Autograd takes longer over a small network than the arithmetic does. Here a gradient is left in its
two factors, the inputs of a layer and the errors at its outputs, and a local step multiplies them
straight into the weights. The gradient itself is never written down, so the step here is not
`fedexp.local.local_step`, which takes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedexp.aggregate import norms
from fedexp.client import LinearCorrection
from fedexp.local import LocalTraining, clip_to
from fedexp.objective.losses import ignored_target, overrides


class Activation(NamedTuple):
    """An activation and its derivative, both in place.

    `forward` takes the sums of a layer, `backward` the errors at its outputs and the outputs.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_ATEN = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(
        torch.relu_,
        lambda e, out: _ATEN.threshold_backward.grad_input(e, out, 0, grad_input=e),
    ),
    nn.Tanh: Activation(
        torch.tanh_, lambda e, out: _ATEN.tanh_backward.grad_input(e, out, grad_input=e)
    ),
    nn.Sigmoid: Activation(
        torch.sigmoid_, lambda e, out: _ATEN.sigmoid_backward.grad_input(e, out, grad_input=e)
    ),
}


class Layer(NamedTuple):
    """A linear layer and the activation that follows it."""

    inputs: int
    outputs: int
    bias: bool
    activation: type[nn.Module] | None = None


class Factors(NamedTuple):
    """The gradient of weights [K, O, F] is errorsᵀ inputs; that of a bias has ones for inputs."""

    inputs: Tensor
    errors: Tensor


@dataclass(frozen=True)
class DenseNetwork:
    """A classifier of linear layers. Weights are a list of [K, O, F], a bias is [K, O, 1].

    Attributes:
        layers: in their order.
        flattens: examples may have any shape, and are flattened first.
        x, y: names of the fields of examples and labels.

    >>> network = dense_network(nn.Linear(2, 3), nn.CrossEntropyLoss(reduction="none"))
    >>> [tuple(w.shape) for w in network.split(torch.zeros(5, 9))]
    [(5, 3, 2), (5, 3, 1)]
    """

    layers: tuple[Layer, ...]
    flattens: bool = False
    x: str = "x"
    y: str = "y"

    @property
    def width(self) -> int:
        """Numbers that all layers compute for one example, its inputs included."""
        return self.layers[0].inputs + sum(layer.outputs for layer in self.layers)

    def split(self, vectors: Tensor) -> list[Tensor]:
        """Return the weights in vectors [..., d], each of them contiguous in memory."""
        shapes = [
            (layer.outputs, columns)
            for layer in self.layers
            for columns in (layer.inputs, *((1,) if layer.bias else ()))
        ]
        parts = vectors.split([rows * columns for rows, columns in shapes], dim=-1)
        pairs = zip(parts, shapes, strict=True)
        return [part.unflatten(-1, shape).contiguous() for part, shape in pairs]

    def join(self, weights: Sequence[Tensor]) -> Tensor:
        """Return vectors [K, d]: the inverse of `split`."""
        return torch.cat([weight.flatten(1) for weight in weights], dim=1)

    def factors(
        self, weights: Sequence[Tensor], x: Tensor, y: Tensor, counted: Tensor
    ) -> list[Factors]:
        """Return the gradients of all weights, for examples [K, B, F] and labels [K, B].

        `counted` [K, B] weighs the examples.
        """
        remaining = iter(weights)
        pairs = [
            (next(remaining), next(remaining) if layer.bias else None) for layer in self.layers
        ]
        inputs = [x]
        for layer, (weight, bias) in zip(self.layers, pairs, strict=True):
            inputs.append(_outputs(layer, weight, bias, inputs[-1]))
        errors = _output_errors(inputs.pop(), y, counted)
        factors: list[Factors] = []
        ones = x.new_ones(*x.shape[:2], 1)
        for at in range(len(self.layers) - 1, -1, -1):
            factors = [
                Factors(inputs[at], errors),
                *([Factors(ones, errors)] if self.layers[at].bias else []),
                *factors,
            ]
            if at:
                errors = torch.bmm(errors, pairs[at][0])
                activation = self.layers[at - 1].activation
                if activation is not None:
                    errors = ACTIVATIONS[activation].backward(errors, inputs[at])
        return factors


def _outputs(layer: Layer, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    columns = weight.mT
    sums = torch.bmm(x, columns) if bias is None else torch.baddbmm(bias.mT, x, columns)
    return sums if layer.activation is None else ACTIVATIONS[layer.activation].forward(sums)


def _output_errors(outputs: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """Return the gradient of the cross entropy: softmax minus the label, [K, B, O]."""
    # classes first: a softmax over ten neighbours in memory takes ten times as long
    shares = torch.softmax(outputs.mT.contiguous(), dim=1)
    labels = y[:, None, :]
    shares.scatter_add_(1, labels, shares.new_full((1, 1, 1), -1).expand(labels.shape))
    return shares.mul_(counted[:, None, :]).mT


@dataclass(frozen=True, eq=False)
class DenseStep:
    """A local step of many dense networks, in place, from the factors of their gradients.

        w ← (1 - η λ) w - η c (g + prox (w - w⁰) + offset),    c = min(1, bound / norm)

    Attributes:
        lr: η.
        local: the weight decay λ and the bound of clipping.
        prox: of the client rule's correction.
        constant: offset - prox w⁰ for each of the weights, or nothing.
    """

    lr: float
    local: LocalTraining
    prox: float
    constant: Sequence[Tensor]

    @classmethod
    def of(
        cls,
        network: DenseNetwork,
        start: Tensor,
        lr: float,
        local: LocalTraining,
        correction: LinearCorrection,
    ) -> DenseStep:
        """Return the step of clients that start at `start` [d] and add `correction`."""
        constant = correction.offset
        if correction.prox:
            behind = -correction.prox * start
            constant = behind if constant is None else constant + behind
        return cls(lr, local, correction.prox, [] if constant is None else network.split(constant))

    def __call__(self, weights: Sequence[Tensor], factors: Sequence[Factors]) -> None:
        """Update the weights, [K, O, F] each, of the first K clients."""
        constant = [c[: len(weights[0])] if c.ndim == 3 else c for c in self.constant]
        if self.local.clip_norm is None:
            self._multiply_into(weights, factors, constant)
        else:
            self._clipped(weights, factors, constant, self.local.clip_norm)

    def _multiply_into(
        self, weights: Sequence[Tensor], factors: Sequence[Factors], constant: Sequence[Tensor]
    ) -> None:
        shrink = 1 - self.lr * (self.local.weight_decay + self.prox)
        for weight, (inputs, errors) in zip(weights, factors, strict=True):
            weight.baddbmm_(errors.mT, inputs, beta=shrink, alpha=-self.lr)
        for weight, shift in zip(weights, constant, strict=False):
            weight.sub_(shift, alpha=self.lr)

    def _clipped(
        self,
        weights: Sequence[Tensor],
        factors: Sequence[Factors],
        constant: Sequence[Tensor],
        bound: float,
    ) -> None:
        """Write the gradients down, because their norm is needed before they are used."""
        grads = [torch.bmm(errors.mT, inputs) for inputs, errors in factors]
        if self.prox:
            for weight, grad in zip(weights, grads, strict=True):
                grad.add_(weight, alpha=self.prox)
        for grad, shift in zip(grads, constant, strict=False):
            grad.add_(shift)
        of_layers = torch.stack([norms(grad.flatten(1)) for grad in grads])
        norm = torch.linalg.vector_norm(of_layers, dim=0)
        rate = (self.lr * clip_to(norm, bound)).to(grads[0].dtype)[:, None, None]
        for weight, grad in zip(weights, grads, strict=True):
            if self.local.weight_decay:
                weight.mul_(1 - self.lr * self.local.weight_decay)
            weight.addcmul_(grad, rate, value=-1)


def dense_network(module: nn.Module, loss: object) -> DenseNetwork | None:
    """Return the network of a module; None where it is not a plain sequence of dense layers.

    The loss must be torch's plain cross entropy per example.
    """
    ignored = ignored_target(loss)
    modules = list(module) if type(module) is nn.Sequential else [module]
    if ignored is None or ignored >= 0 or any(map(overrides, (module, *modules))):
        return None
    first = modules[0] if modules else None
    flattens = type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1)
    layers = _layers(modules[flattens:])
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    size = sum(layer.outputs * (layer.inputs + layer.bias) for layer in layers or ())
    # they differ where layers share weights or some are frozen
    return DenseNetwork(tuple(layers), flattens) if layers and size == trained else None


def _layers(modules: Sequence[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for module in modules:
        if type(module) is nn.Linear:
            layers.append(Layer(module.in_features, module.out_features, module.bias is not None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=type(module))
        else:
            return None
    return layers if layers and layers[-1].activation is None else None
