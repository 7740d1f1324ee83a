"""A client rule at work inside somebody else's training loop, parameter by parameter.

Client rules are elementwise, so correcting each parameter's gradient with its own piece of the flat
vectors is the same as correcting the whole: the mathematics stays in `fedexp.client`.

`LocalRule`: FedProx and SCAFFOLD in an existing PyTorch ClientApp, by two lines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from flwr.app import Array, ArrayRecord, Context, Message
from torch import Tensor, nn
from torch.optim import SGD as TorchSGD
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fedexp.client import SGD, Tensors
from fedexp.errors import UsageError, require
from fedexp.flower.layout import Layout, Slot
from fedexp.flower.request import Metrics, Request


@dataclass(eq=False)
class Piece:
    """One parameter of the model, and where it lies in the flat vectors.

    Attributes:
        places: a slice for each of its names; tied weights have several.
        travel: the sum of the learning rates of its steps so far.
        drawn: the sum of learning rate times corrected gradient, where it is needed.
        corrected: whether its gradient has been corrected since the last step.
    """

    name: str
    param: nn.Parameter
    places: list[slice]
    start: Tensor
    broadcast: Tensors
    client_state: Tensors
    total_lr: float = 0.0
    drawn: Tensor | None = None
    corrected: bool = False


class Corrections:
    """The gradient corrections of one client in one round.

    Args:
        request: what the server asks for.
        model: the model, already loaded with what the server sent.
        sums_gradients: whether `finish` takes the gradients that the optimiser saw instead of how
            far the model went; right for any optimiser, while the way is that of plain SGD only.
    """

    def __init__(self, request: Request, model: nn.Module, sums_gradients: bool) -> None:
        self.request = request
        self.sums_gradients = sums_gradients and bool(request.client_state)
        self.pieces: dict[int, Piece] = {}
        slices = _slices(request)
        for name, param in model.named_parameters(remove_duplicate=False):
            if name not in slices:
                continue
            if id(param) in self.pieces:
                self.pieces[id(param)].places.append(slices[name])
            elif param.requires_grad:
                self.pieces[id(param)] = self._piece(name, param, slices[name])

    def _piece(self, name: str, param: nn.Parameter, place: slice) -> Piece:
        request = self.request
        sent = request.start[place].view(param.shape)
        require(
            torch.equal(param.detach().cpu(), sent.to(param.dtype)),
            f"{name!r} is not what the server sent; make LocalRule after model.load_state_dict",
        )
        broadcast, client_state = (
            {k: v[place].view(param.shape).to(param.device) for k, v in vectors.items()}
            for vectors in (request.broadcast, request.client_state)
        )
        return Piece(name, param, [place], param.detach().clone(), broadcast, client_state)

    @torch.no_grad()
    def correct(self, pieces: Iterable[Piece]) -> None:
        """Correct the gradients in place. One that is not there is zero, as in the simulator."""
        rule = self.request.rule
        for piece in pieces:
            param = piece.param
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            require(
                not param.grad.is_sparse,
                f"{piece.name!r} has sparse gradients, which cannot be corrected; build the layer "
                "with sparse=False",
            )
            param.grad.copy_(
                rule.correct(
                    param.grad, param.detach(), piece.start, piece.broadcast, piece.client_state
                )
            )
            piece.corrected = True

    @torch.no_grad()
    def count(self, piece: Piece, lr: float) -> None:
        """Note a step of a parameter along its corrected gradient."""
        piece.total_lr += lr
        piece.corrected = False
        if self.sums_gradients and piece.param.grad is not None:
            grad = piece.param.grad
            if piece.drawn is None:
                wide = torch.promote_types(grad.dtype, torch.float32)
                piece.drawn = torch.zeros_like(grad, dtype=wide)
            piece.drawn.add_(grad, alpha=lr)

    def finish(self, delta: Tensor) -> tuple[Tensors, Tensors]:
        """What the client keeps and what it adds to the sums, after an update Δ_i.

        A number that never moved (a frozen parameter, or no step at all) keeps the state it had
        and adds nothing: nothing was learned about it.
        """
        request, total_lr = self.request, torch.zeros_like(delta)
        for piece in self.pieces.values():
            for place in piece.places:
                self._check(piece, delta[place])
                total_lr[place] = piece.total_lr
        if self.sums_gradients:
            delta = self._drawn(delta)
        moved = total_lr > 0
        kept, extras = request.rule.end_round(
            delta, torch.where(moved, total_lr, 1.0), request.broadcast, request.client_state
        )
        kept = {name: torch.where(moved, v, request.client_state[name]) for name, v in kept.items()}
        return kept, {name: torch.where(moved, v, 0.0) for name, v in extras.items()}

    def _drawn(self, delta: Tensor) -> Tensor:
        """How far plain SGD would have gone with the same gradients: sum of η ĝ."""
        drawn = torch.zeros_like(delta)
        for piece in self.pieces.values():
            if piece.drawn is not None:
                for place in piece.places:
                    drawn[place] = piece.drawn.flatten().to(drawn)
        return drawn

    def _check(self, piece: Piece, delta: Tensor) -> None:
        require(
            piece.total_lr > 0 or not bool(delta.any()),
            f"{piece.name!r} was trained without its gradients being corrected; give LocalRule "
            "every optimiser of the loop, or call took_step(lr) in a loop without one",
        )


def _slices(request: Request) -> dict[str, slice]:
    """Where each parameter lies in the flat vectors."""
    places, at = {}, 0
    for slot in request.layout.slots:
        if slot.kind == "parameter":
            places[slot.name] = slice(at, at + slot.size)
            at += slot.size
    return places


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
