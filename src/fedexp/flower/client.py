"""`LocalRule`: FedProx and SCAFFOLD in an existing PyTorch training loop, by two lines.

Client rules are elementwise, so correcting each parameter's gradient with its own slice of the flat
vectors is the same as correcting the whole vector: the maths is that of `fedexp.client`.
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
from fedexp.flower.layout import Layout
from fedexp.flower.metrics import Metrics
from fedexp.flower.request import TrainRequest

# so that an optimiser which is reused in a later round has one hook only
_hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


class LocalRule:
    """The client rule of a train message, around the user's own training loop::

        model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        local = LocalRule(msg, context, model, optimizer)
        ...  # the training loop, unchanged
        return local.reply({"num-examples": len(data), "train_loss": loss})

    Every `optimizer.step()` first corrects the gradients by the rule that the message names. A loop
    that clips gradients calls `local.correct()` before it does, so that the corrected gradient is
    clipped as in the paper; otherwise the correction is added after the clipping. A loop without an
    optimiser calls `local.correct()` before each step and `local.took_step(lr)` after it.

    Args:
        msg: the train message.
        context: of the node.
        model: loaded with the message's arrays.
        optimizers: all optimisers of the loop.
    """

    def __init__(
        self, msg: Message, context: Context, model: nn.Module, *optimizers: Optimizer
    ) -> None:
        self.request, self.model = TrainRequest.of(msg, context, model), model
        self.optimizers = optimizers
        _check_model(self.request.layout, model)
        for optimizer in optimizers:
            _check_optimizer(optimizer, model)
            _unhook(optimizer)
        self.corrections: _Corrections | None = None
        if self.request.rule != SGD():
            is_plain = all(_is_plain_sgd(optimizer) for optimizer in optimizers)
            self.corrections = _Corrections(self.request, model, sums_gradients=not is_plain)
            for optimizer in optimizers:
                _hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)

    def correct(self) -> None:
        """Correct the gradients now; the next step will not correct them again."""
        if self.corrections is not None:
            self.corrections.correct(self.corrections.params.values())

    def took_step(self, lr: float) -> None:
        """Count a step that was taken without an optimiser: w ← w - lr · grad."""
        if self.corrections is not None:
            for trained in self.corrections.params.values():
                self.corrections.count(trained, lr)

    def reply(self, metrics: Metrics) -> Message:
        """Return the reply: the model, the metrics, and what the rule adds to the sums.

        The client state for its next round is on disk before this returns.

        Args:
            metrics: of the training, `num-examples` among them.
        """
        for optimizer in self.optimizers:
            _unhook(optimizer)
        arrays = self._arrays()
        if self.corrections is None:
            return self.request.reply(arrays, metrics, {}, {})
        delta = self.request.start - self.request.layout.flat(arrays)
        return self.request.reply(arrays, metrics, *self.corrections.end_round(delta))

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
            of_model = self.corrections.params
            stepped = [of_model[id(p)] for p in group["params"] if id(p) in of_model]
            self.corrections.correct(p for p in stepped if not p.corrected)
            for trained in stepped:
                self.corrections.count(trained, float(group["lr"]))

    def _arrays(self) -> ArrayRecord:
        """Return the model with exactly the names and types that the server sent."""
        named, arrays = self.model.state_dict(), ArrayRecord()
        for slot in self.request.layout.slots:
            dtype = getattr(torch, slot.dtype.name)  # cast by torch, as numpy has no bfloat16
            arrays[slot.name] = Array(named[slot.name].detach().cpu().to(dtype).numpy())
        return arrays


@dataclass(eq=False)
class _TrainedParam:
    """One parameter of the model with its slices of the flat vectors.

    Attributes:
        slices: one per name; tied weights have several.
        start: its value at the start of the round.
        total_lr: the sum of the learning rates of its steps so far.
        sgd_update: the sum of learning rate times corrected gradient, where needed.
        corrected: whether its gradient has been corrected since the last step.
    """

    name: str
    param: nn.Parameter
    slices: list[slice]
    start: Tensor
    broadcast: Tensors
    client_state: Tensors
    total_lr: float = 0.0
    sgd_update: Tensor | None = None
    corrected: bool = False


class _Corrections:
    """The gradient corrections of one client in one round.

    Args:
        request: the train message.
        model: loaded with the message's arrays.
        sums_gradients: whether `end_round` uses the sum of the corrected gradients, which is right
            for any optimiser, instead of the update, which is that sum for plain SGD only.
    """

    def __init__(self, request: TrainRequest, model: nn.Module, sums_gradients: bool) -> None:
        self.request = request
        self.sums_gradients = sums_gradients and bool(request.client_state)
        self.params: dict[int, _TrainedParam] = {}
        offsets = request.layout.offsets()
        for name, param in model.named_parameters(remove_duplicate=False):
            if name not in offsets:
                continue
            entries = slice(offsets[name], offsets[name] + param.numel())
            if id(param) in self.params:
                self.params[id(param)].slices.append(entries)
            elif param.requires_grad:
                self.params[id(param)] = self._trained_param(name, param, entries)

    def _trained_param(self, name: str, param: nn.Parameter, entries: slice) -> _TrainedParam:
        request = self.request
        sent = request.start[entries].view(param.shape)
        require(
            torch.equal(param.detach().cpu(), sent.to(param.dtype)),
            f"{name!r} is not what the server sent; create LocalRule after model.load_state_dict",
        )
        broadcast, client_state = (
            {k: v[entries].view(param.shape).to(param.device) for k, v in vectors.items()}
            for vectors in (request.broadcast, request.client_state)
        )
        return _TrainedParam(
            name, param, [entries], param.detach().clone(), broadcast, client_state
        )

    @torch.no_grad()
    def correct(self, params: Iterable[_TrainedParam]) -> None:
        """Correct the gradients in place; a missing one is zero, as in the simulator."""
        rule = self.request.rule
        for trained in params:
            param = trained.param
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            require(
                not param.grad.is_sparse,
                f"{trained.name!r} has sparse gradients, which cannot be corrected; build the "
                "layer with sparse=False",
            )
            states = trained.broadcast, trained.client_state
            param.grad.copy_(rule.correct(param.grad, param.detach(), trained.start, *states))
            trained.corrected = True

    @torch.no_grad()
    def count(self, trained: _TrainedParam, lr: float) -> None:
        """Count a step of a parameter along its corrected gradient."""
        trained.total_lr += lr
        trained.corrected = False
        grad = trained.param.grad
        if self.sums_gradients and grad is not None:
            if trained.sgd_update is None:
                wide = torch.promote_types(grad.dtype, torch.float32)
                trained.sgd_update = torch.zeros_like(grad, dtype=wide)
            trained.sgd_update.add_(grad, alpha=lr)

    def end_round(self, delta: Tensor) -> tuple[Tensors, Tensors]:
        """Return the new client state and what the client adds to the sums, after an update Δ_i.

        Entries without a step (of a frozen parameter, or in a round without any) leave their state
        unchanged and add nothing.
        """
        request, total_lr = self.request, torch.zeros_like(delta)
        sgd_update = torch.zeros_like(delta)  # of plain SGD with the same gradients: sum of η ĝ
        for trained in self.params.values():
            for entries in trained.slices:
                require(
                    trained.total_lr > 0 or not bool(delta[entries].any()),
                    f"{trained.name!r} was trained without its gradients being corrected; give "
                    "LocalRule every optimiser of the loop, or call took_step(lr) in a loop "
                    "without one",
                )
                total_lr[entries] = trained.total_lr
                if trained.sgd_update is not None:
                    sgd_update[entries] = trained.sgd_update.flatten().to(delta)
        stepped = total_lr > 0
        state, extras = request.rule.end_round(
            sgd_update if self.sums_gradients else delta,
            torch.where(stepped, total_lr, 1.0),
            request.broadcast,
            request.client_state,
        )
        before = request.client_state
        state = {name: torch.where(stepped, v, before[name]) for name, v in state.items()}
        return state, {name: torch.where(stepped, v, 0.0) for name, v in extras.items()}


def _check_model(layout: Layout, model: nn.Module) -> None:
    """Refuse a model whose arrays are not those of the message."""
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
    """Refuse an optimiser of other parameters, or one that maximises."""
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"LocalRule takes optimisers of torch.optim, not a {type(optimizer).__name__}; "
            "in a loop without one call correct() and took_step(lr)"
        )
    of_model = {id(param) for param in model.parameters()}
    for group in optimizer.param_groups:
        require(
            all(id(param) in of_model for param in group["params"]),
            "the optimiser trains parameters that the model does not have; give LocalRule the "
            "model and the optimiser that was made from its parameters",
        )
        require(not group.get("maximize"), "client rules descend; make the optimiser minimise")


def _is_plain_sgd(optimizer: Optimizer) -> bool:
    """Return whether a step is w - lr (grad + λ w), so that the update gives the mean gradient."""
    groups = optimizer.param_groups
    return type(optimizer) is TorchSGD and not any(group["momentum"] for group in groups)


def _unhook(optimizer: Optimizer) -> None:
    if optimizer in _hooks:
        _hooks.pop(optimizer).remove()
