"""Dense networks of many clients, with the gradient written out: what suits a CPU.

Autograd takes longer over a small network than the arithmetic does. Here a gradient is left in its
two factors, the inputs of a layer and the errors at its outputs, so that an update can add their
product to the weights where they lie.

A local step of many dense networks, straight from the factors of their gradients.

    w ← (1 - η λ) w - η c (g + pull (w - w⁰) + push),    c = min(1, bound / norm)

Without clipping g is never written down: its factors are multiplied into the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedexp.aggregate import norms
from fedexp.client import LinearCorrection
from fedexp.local import LocalTraining
from fedexp.objective.module import ModuleObjective


class Activation(NamedTuple):
    """What a layer does to its sums, and to the errors on their way back, both in place.

    The way back is given what the layer returned.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


_AT = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(
        torch.relu_,
        lambda e, out: _AT.threshold_backward.grad_input(e, out, 0, grad_input=e),
    ),
    nn.Tanh: Activation(
        torch.tanh_, lambda e, out: _AT.tanh_backward.grad_input(e, out, grad_input=e)
    ),
    nn.Sigmoid: Activation(
        torch.sigmoid_, lambda e, out: _AT.sigmoid_backward.grad_input(e, out, grad_input=e)
    ),
}


class Layer(NamedTuple):
    """A linear layer and what follows it."""

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

    >>> network = dense_network(ModuleObjective(nn.Linear(2, 3)))
    >>> [tuple(w.shape) for w in network.split(torch.zeros(5, 9))]
    [(5, 3, 2), (5, 3, 1)]
    """

    layers: tuple[Layer, ...]
    flattens: bool = False

    @property
    def width(self) -> int:
        """Numbers that an example takes on its way through all layers."""
        return self.layers[0].inputs + sum(layer.outputs for layer in self.layers)

    def split(self, vectors: Tensor) -> list[Tensor]:
        """The weights in vectors [..., d], each of them contiguous in memory."""
        shapes = [
            (layer.outputs, columns)
            for layer in self.layers
            for columns in (layer.inputs, *((1,) if layer.bias else ()))
        ]
        parts = vectors.split([rows * columns for rows, columns in shapes], dim=-1)
        each = zip(parts, shapes, strict=True)
        return [part.unflatten(-1, shape).contiguous() for part, shape in each]

    def join(self, weights: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`: vectors [K, d]."""
        return torch.cat([weight.flatten(1) for weight in weights], dim=1)

    def factors(
        self, weights: Sequence[Tensor], x: Tensor, y: Tensor, counted: Tensor
    ) -> list[Factors]:
        """The gradients of all weights, for examples [K, B, F] and labels [K, B].

        `counted` [K, B] weighs the examples.
        """
        pairs, inputs = self._pairs(weights), [x]
        for layer, (weight, bias) in zip(self.layers, pairs, strict=True):
            inputs.append(_outputs(layer, weight, bias, inputs[-1]))
        errors = _output_errors(inputs.pop(), y, counted)
        found: list[Factors] = []
        ones = x.new_ones(*x.shape[:2], 1)
        for at in range(len(self.layers) - 1, -1, -1):
            found = [
                Factors(inputs[at], errors),
                *([Factors(ones, errors)] if self.layers[at].bias else []),
                *found,
            ]
            if at:
                errors = torch.bmm(errors, pairs[at][0])
                errors = _through(self.layers[at - 1], errors, inputs[at])
        return found

    def _pairs(self, weights: Sequence[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
        waiting = iter(weights)
        return [(next(waiting), next(waiting) if layer.bias else None) for layer in self.layers]


def _outputs(layer: Layer, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    turned = weight.mT
    sums = torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.mT, x, turned)
    return sums if layer.activation is None else ACTIVATIONS[layer.activation].forward(sums)


def _through(layer: Layer, errors: Tensor, outputs: Tensor) -> Tensor:
    """From the outputs of a layer to its sums."""
    if layer.activation is None:
        return errors
    return ACTIVATIONS[layer.activation].backward(errors, outputs)


def _output_errors(outputs: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """The gradient of the cross entropy: softmax less the label, [K, B, O]."""
    # classes first: a softmax over ten neighbours in memory takes ten times as long
    shares = torch.softmax(outputs.mT.contiguous(), dim=1)
    labels = y[:, None, :]
    shares.scatter_add_(1, labels, shares.new_full((1, 1, 1), -1).expand(labels.shape))
    return shares.mul_(counted[:, None, :]).mT


def dense_network(objective: ModuleObjective) -> DenseNetwork | None:
    """The network of an objective, if it is a plain sequence of dense layers that classifies."""
    loss, module = objective.loss, objective.module
    if not isinstance(loss, nn.CrossEntropyLoss) or not _is_plain(loss):
        return None
    modules = list(module) if type(module) is nn.Sequential else [module]
    if any(_is_changed(each) for each in (module, *modules)):
        return None
    flattens = bool(modules) and _flattens(modules[0])
    layers = _layers(modules[flattens:])
    trained = sum(p.numel() for p in objective.params)
    known = sum(layer.outputs * (layer.inputs + layer.bias) for layer in layers or ())
    # they differ where layers share weights or keep some frozen
    return DenseNetwork(tuple(layers), flattens) if layers and known == trained else None


def _is_plain(loss: nn.CrossEntropyLoss) -> bool:
    weighs = loss.weight is not None or loss.label_smoothing or loss.ignore_index >= 0
    return type(loss) is nn.CrossEntropyLoss and loss.reduction == "none" and not weighs


def _layers(modules: Sequence[nn.Module]) -> list[Layer] | None:
    layers: list[Layer] = []
    for each in modules:
        if type(each) is nn.Linear:
            layers.append(Layer(each.in_features, each.out_features, each.bias is not None))
        elif type(each) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=type(each))
        else:
            return None
    return layers if layers and layers[-1].activation is None else None


def _flattens(layer: nn.Module) -> bool:
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def _is_changed(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says: hooks, or a forward of its own."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


@dataclass(frozen=True, eq=False)
class DenseStep:
    """Moves weights in place.

    Attributes:
        lr: η.
        local: the weight decay λ and the bound of clipping.
        pull: of the client rule's correction.
        constant: push - pull w⁰ for each of the weights, or nothing.
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
        """The step of clients that begin at `start` [d] and add `drift`."""
        constant = correction.offset
        if correction.prox:
            behind = -correction.prox * start
            constant = behind if constant is None else constant + behind
        return cls(lr, local, correction.prox, [] if constant is None else network.split(constant))

    def __call__(self, weights: Sequence[Tensor], factors: Sequence[Factors]) -> None:
        """Move the weights, [K, O, F] each, of the first K clients."""
        constant = [c[: len(weights[0])] if c.ndim == 3 else c for c in self.constant]
        if self.local.clip_norm is None:
            self._move(weights, factors, constant)
        else:
            self._move_clipped(weights, factors, constant, self.local.clip_norm)

    def _move(
        self, weights: Sequence[Tensor], factors: Sequence[Factors], constant: Sequence[Tensor]
    ) -> None:
        keep = 1 - self.lr * (self.local.weight_decay + self.prox)
        for weight, (inputs, errors) in zip(weights, factors, strict=True):
            weight.baddbmm_(errors.mT, inputs, beta=keep, alpha=-self.lr)
        for weight, shift in zip(weights, constant, strict=False):
            weight.sub_(shift, alpha=self.lr)

    def _move_clipped(
        self,
        weights: Sequence[Tensor],
        factors: Sequence[Factors],
        constant: Sequence[Tensor],
        bound: float,
    ) -> None:
        grads = [torch.bmm(errors.mT, inputs) for inputs, errors in factors]
        for weight, grad in zip(weights, grads, strict=True):
            if self.prox:
                grad.add_(weight, alpha=self.prox)
        for grad, shift in zip(grads, constant, strict=False):
            grad.add_(shift)
        norm = torch.linalg.vector_norm(torch.stack([norms(g.flatten(1)) for g in grads]), dim=0)
        rate = self.lr * (bound / norm).clamp(max=1.0)
        rate = rate.to(grads[0].dtype)[:, None, None]
        for weight, grad in zip(weights, grads, strict=True):
            if self.local.weight_decay:
                weight.mul_(1 - self.lr * self.local.weight_decay)
            weight.addcmul_(grad, rate, value=-1)
