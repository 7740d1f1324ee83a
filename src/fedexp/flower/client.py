"""`LocalRule`: FedProx and SCAFFOLD in an existing PyTorch ClientApp, by two lines."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.optim import SGD as TorchSGD
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fedexp.client import SGD
from fedexp.errors import UsageError, require
from fedexp.flower.corrections import Corrections
from fedexp.flower.layout import Layout, Slot
from fedexp.flower.request import Metrics, Request

# So that an optimiser which outlives its round is never corrected twice.
_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class LocalRule:
    """The client rule that the server asks for, around the user's own training loop::

        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = LocalRule(msg, context, model, optimizer)
        ...  # the training loop, unchanged
        return local.reply({"num-examples": len(data), "train_loss": loss})

    Every `optimizer.step()` first corrects the gradients as the rule says; which rule it is, the
    message tells. A loop that clips gradients calls `local.correct()` before it does, so that the
    corrected gradient is clipped as in the paper; else the correction comes after the clipping.
    A loop without an optimiser calls `local.correct()` before each step and `local.took_step(lr)`
    after it.

    Args:
        msg: the train message.
        context: the node's context.
        model: loaded with the message's arrays.
        optimizers: all that train it.
    """

    def __init__(
        self, msg: Message, context: Context, model: nn.Module, *optimizers: Optimizer
    ) -> None:
        self.request, self.model = Request.of(msg, context, model), model
        self.optimizers = optimizers
        _check_model(self.request.layout, model)
        for optimizer in optimizers:
            _check_optimizer(optimizer, model)
            _unhook(optimizer)
        self.corrections: Corrections | None = None
        if self.request.rule != SGD():
            plain = all(_is_plain(each) for each in optimizers)
            self.corrections = Corrections(self.request, model, sums_gradients=not plain)
            for optimizer in optimizers:
                _hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def correct(self) -> None:
        """Correct the gradients now; the coming step will not do it again."""
        if self.corrections is not None:
            self.corrections.correct(self.corrections.pieces.values())

    def took_step(self, lr: float) -> None:
        """Tell of a step that was taken without an optimiser: w ← w - lr · grad."""
        if self.corrections is not None:
            for piece in self.corrections.pieces.values():
                self.corrections.count(piece, lr)

    def reply(self, metrics: Metrics) -> Message:
        """The reply: the model, the metrics, and what the rule adds to the server's sums.

        What the client keeps for its next round is on disk before this returns.

        Args:
            metrics: numbers for the server, `num-examples` among them.
        """
        for optimizer in self.optimizers:
            _unhook(optimizer)
        arrays = self._arrays()
        if self.corrections is None:
            return self.request.reply(arrays, metrics, {}, {})
        delta = self.request.start - self.request.layout.flat(arrays)
        return self.request.reply(arrays, metrics, *self.corrections.finish(delta))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self.corrections is not None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        require(
            closure is None,
            "step(closure) computes gradients where they cannot be corrected; call backward() "
            "and then step()",
        )
        require(
            getattr(optimizer, "grad_scale", None) is None,
            "the gradients are still scaled; call scaler.unscale_(optimizer) before scaler.step",
        )
        if float(getattr(optimizer, "found_inf", 0.0)):
            return  # a fused optimiser that will skip this step
        for group in optimizer.param_groups:
            known = [self.corrections.pieces.get(id(p)) for p in group["params"]]
            pieces = [piece for piece in known if piece is not None]
            self.corrections.correct(piece for piece in pieces if not piece.corrected)
            for piece in pieces:
                self.corrections.count(piece, float(group["lr"]))

    def _arrays(self) -> ArrayRecord:
        """The model with exactly the names and types that the server sent."""
        named = self.model.state_dict()
        slots = self.request.layout.slots
        return ArrayRecord({slot.name: Array(_sendable(slot, named[slot.name])) for slot in slots})


def _sendable(slot: Slot, value: Tensor) -> Any:
    """The value in the type it was sent in; through torch, because numpy has no bfloat16."""
    wanted: torch.dtype = getattr(torch, slot.dtype.name)
    return value.detach().cpu().to(wanted).numpy()


def _check_model(layout: Layout, model: nn.Module) -> None:
    """Refuse a model that is not the one the server sends."""
    named = model.state_dict()
    for slot in layout.slots:
        require(
            slot.name in named,
            f"the model has no {slot.name!r}; give LocalRule the model whose state_dict the "
            "server sends (not a wrapped or compiled one)",
        )
        shape = tuple(named[slot.name].shape)
        require(
            shape == slot.shape, f"{slot.name!r} is {shape} here, but {slot.shape} at the server"
        )


def _check_optimizer(optimizer: Optimizer, model: nn.Module) -> None:
    """Refuse an optimiser that trains something else, or uphill."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"LocalRule takes optimisers of torch.optim, not a {type(optimizer).__name__}; "
            "for a loop of your own use correct() and took_step(lr)"
        )
    own = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        require(
            all(id(param) in own for param in group["params"]),
            "the optimiser trains parameters that the model does not have; give LocalRule the "
            "model and the optimiser that was made from its parameters",
        )
        require(not group.get("maximize"), "client rules descend; make the optimiser minimise")


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether a step is w - lr (grad + λ w): then the way gone tells the mean gradient."""
    groups = optimizer.param_groups
    return type(optimizer) is TorchSGD and not any(group["momentum"] for group in groups)


def _unhook(optimizer: Optimizer) -> None:
    if optimizer in _hooks:
        _hooks.pop(optimizer).remove()
