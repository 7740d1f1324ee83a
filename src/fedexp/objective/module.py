"""`ModuleObjective`: the loss of any `nn.Module` as a function of a flat parameter vector.

The module is called as it is, by `torch.func.vmap` (`functional.py`) or by stacked layers
(`stack.py`). Models that torch would fail on in the middle of a round are refused when the
objective is built, and models that `deepcopy` does not reproduce are built anew for every copy.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedexp.data.federation import Batch
from fedexp.errors import require
from fedexp.kernels.launch import compile_in_parallel, has_triton
from fedexp.objective import models
from fedexp.objective.base import (
    DEFAULT_FIELDS,
    Buffers,
    Constants,
    Fields,
    as_type,
    flat_parts,
    flatten,
    pieces,
    version,
)
from fedexp.objective.dense import DenseNetwork, dense_network
from fedexp.objective.functional import FunctionalModule, put, read, slots_of
from fedexp.objective.losses import (
    ClassLoss,
    Loss,
    check_shapes,
    class_loss,
    copied_loss,
    examples_of,
    ignored_target,
    loss_on,
    overrides,
    reduced,
)
from fedexp.objective.stack import CannotStackError, Stack, StackedClients
from fedexp.precision import Precision, widest
from fedexp.seeding import preserved_draws, seeded_torch

LARGE_SEQUENCE_MODEL = 100_000  # parameters from which clients are not batched on a CPU

log = logging.getLogger("fedexp")


class ModuleObjective:
    """The loss of any `nn.Module` on batches of inputs and targets, `x` and `y` by default.

    The module is scratch space: parameters and buffers are set from the arguments at every call,
    so the methods are pure to their callers. Threads must not share one: give each its own copy.
    Parameters that need no gradient are those of the first module built, whatever the seed.

    Args:
        build: makes a module; it is called under a seed, so the initial weights follow from it.
            Or a module, whose weights are the initial ones.
        loss: per-example loss of (outputs, targets), i.e. with `reduction="none"`.
        classifies: whether the largest output names the class, so that accuracy has a meaning.
        fields: the inputs of the model and the targets of the loss, by the names of the data.
        per_example: False for a loss that returns one number for a batch.
        ignore_index: target that counts neither in the loss nor in the accuracy. Such targets are
            zeros in the mean over the targets of an example; an evaluation divides by the part that
            counts (`Task.parts`).
    """

    def __init__(
        self,
        build: Callable[[], nn.Module] | nn.Module,
        loss: Loss | None = None,
        classifies: bool = True,
        fields: Fields = DEFAULT_FIELDS,
        per_example: bool = True,
        ignore_index: int | None = None,
    ) -> None:
        if isinstance(build, nn.Module):
            models.check_trainable(build)
            require(
                models.is_copied_whole(build),
                "this model has hooks or a forward that a copy would not follow; pass a function "
                "that builds it, e.g. lambda: MyModel()",
            )
            build = deepcopy(build)  # the caller may train it later
        # the same for every seed; not what `build` copies, so that digests stay as stored
        self._start = deepcopy(build) if isinstance(build, nn.Module) else None
        self.build = partial(deepcopy, build) if isinstance(build, nn.Module) else build
        self.fields = fields
        self._set_loss(loss, classifies, per_example, ignore_index)
        with seeded_torch(0, "initial weights"):
            module = models.built_model(self.build) if self._start is None else self._start
        models.check_trainable(module)
        self._initial: tuple[int, nn.Module] | None = (0, module)  # of a seed; never written to
        if models.has_constants(module) or not models.is_copied_whole(module):
            with seeded_torch(0, "scratch"):
                module = self.build()
            self._initial = None if module is self._initial[1] else self._initial
        # a copy, in case that `build` returns one module again and again
        self.module = deepcopy(module) if models.is_copied_whole(module) else module
        self.device = torch.device("cpu")
        self.compute_type: torch.dtype | None = None
        self._list_tensors()
        require(bool(self.params), "the model has no trainable parameters")

    def _set_loss(
        self, loss: Loss | None, classifies: bool, per_example: bool, ignore_index: int | None
    ) -> None:
        self.loss: Loss = loss or nn.CrossEntropyLoss(reduction="none")
        self.classifies, self.per_example = classifies, per_example
        self.ignore_index = ignore_index
        require(
            not models.refers_to_weights(self.loss),
            "the loss has weights of its own or refers to a model's, which are not trained by it; "
            "compute what needs them in the model's forward",
        )

    def with_loss(
        self,
        loss: Loss,
        classifies: bool,
        per_example: bool = True,
        ignore_index: int | None = None,
    ) -> ModuleObjective:
        """Return the objective with another loss; the model is shared, so use only one of them."""
        other = copy(self)
        other._set_loss(loss, classifies, per_example, ignore_index)
        return other

    def starting_at(self, params: Tensor, buffers: Buffers) -> ModuleObjective:
        """Return a copy whose initial model has these weights, whatever the seed."""
        other = self.copy()
        other._start = self.load(
            params.to(self.device), Buffers(*(b.to(self.device) for b in buffers))
        )
        return other

    def starting_from(self, weights: nn.Module | Mapping[str, Tensor]) -> ModuleObjective:
        """Return a copy that starts at the weights of a module or of its `state_dict`.

        Frozen weights are taken from it as well. Buffers that are in no `state_dict` are the given
        ones, or else those of the initial model. Names and shapes must be those of the model.
        """
        tensors = models.all_tensors(weights) if isinstance(weights, nn.Module) else weights
        other = self.copy()
        stored = other.module.state_dict().keys()
        state = {n: v for n, v in tensors.items() if n in stored or n not in other.buffer_names}
        other._bind(*self.initial(0))  # over what the last evaluation left in the module
        for name, slots in zip(other.buffer_names, other.slots, strict=True):
            if name not in stored and name in tensors:
                put(slots, tensors[name].detach().to(read(slots), copy=True))
        other.module.load_state_dict(state)
        other._list_tensors()
        other._start = other.copy().module
        return other

    def _list_tensors(self) -> None:
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.names = [n for n, p in self.module.named_parameters() if p.requires_grad]
        buffers = dict(self.module.named_buffers())
        averaged = [name for name, b in buffers.items() if b.is_floating_point()]
        # complex ones stay as in the first module: they are tables, not statistics
        kept = [n for n, b in buffers.items() if not (b.is_floating_point() or b.is_complex())]
        self.averaged = [buffers[name] for name in averaged]
        self.kept = [buffers[name] for name in kept]
        self.buffer_names = [*averaged, *kept]
        # a forward pass may write to its buffers or replace them: both are followed
        self.slots = [slots_of(self.module, buffers[name]) for name in self.buffer_names]
        # parameters with their version, and a copy of them
        self._evaluated: tuple[Tensor, int, Tensor] | None = None
        self.stack: Stack | None = None
        self._functional: FunctionalModule | None = None
        self._evaluates_stacked = False
        self._compiled = False  # the kernels of the stack
        self._evaluated_stacked: tuple[Tensor, int, StackedClients] | None = None

    def on(self, device: torch.device, precision: Precision) -> ModuleObjective:
        """Return a copy on the device; with bf16, layers compute in it and weights do not."""
        copied = self.copy()
        copied.device = device
        copied.loss = loss_on(copied.loss, device)
        _convert(copied.module, device)
        copied.compute_type = torch.bfloat16 if precision == "bf16" else None
        copied._list_tensors()
        return copied

    def copy(self, dtype: torch.dtype | None = None, dropout: bool = True) -> ModuleObjective:
        """Return an objective with a module of its own.

        Args:
            dtype: type of its parameters, in which its layers compute; None for no change.
            dropout: whether dropout layers are active.
        """
        other = copy(self)
        other.loss = copied_loss(self.loss)
        if models.is_copied_whole(self.module):
            other.module = deepcopy(self.module)
        else:
            with seeded_torch(0, "scratch"):
                other.module = self._built().to(self.device)
            other.module.load_state_dict(self.module.state_dict())
        if dtype is not None:
            _convert(other.module, dtype)
            other.loss = loss_on(other.loss, dtype)
            other.compute_type = None
        if not dropout:
            models.disable_dropout(other.module)
        other._list_tensors()
        return other

    def constants(self) -> Constants:
        if type(self) is not ModuleObjective or not models.is_copied_whole(self.module):
            return Constants((self,))
        settings = (self.compute_type, self.per_example, self.classifies, self.ignore_index)
        values = (self.module, self.loss, self.fields, self.device, *settings)
        return Constants(values, (*self.params, *map(read, self.slots)))

    def batching_pays(self, device: torch.device) -> bool:
        """Return True on a GPU; on a CPU where most of the time is the interpreter's.

        There dense layers are two to four times as fast, small transformers 1.2 to 2 times, a mean
        of embeddings 5 times. An LSTM of 256 units takes 2.7 times as long, since torch has one
        kernel for its whole sequence, and recurrent cells of 256 units 1.5 times. Sequence models
        of 650,000 parameters and more take 1 to 1.8 times as long, since the weights of all clients
        do not fit the cache.
        """
        if device.type != "cpu":
            return True
        layers = list(self.module.modules())
        if any(isinstance(m, _ConvNd | nn.RNNBase | nn.RNNCellBase) for m in layers):
            return False
        large = sum(p.numel() for p in self.params) >= LARGE_SEQUENCE_MODEL
        return not (large and self.has_sequence_layers())

    def has_sequence_layers(self) -> bool:
        kinds = nn.RNNBase | nn.RNNCellBase | nn.Embedding | nn.MultiheadAttention
        return any(isinstance(layer, kinds) for layer in self.module.modules())

    def initial_module(self, seed: int) -> nn.Module:
        """Return the module with the initial weights of a seed, built once; do not write to it."""
        if self._start is not None:
            return self._start
        if self._initial is None or self._initial[0] != seed:
            with seeded_torch(seed, "initial weights"):
                self._initial = seed, self._built()
        return self._initial[1]

    def initial(self, seed: int) -> tuple[Tensor, Buffers]:
        module = self.initial_module(seed)
        params = flatten([p.detach() for p in module.parameters() if p.requires_grad])
        buffers = dict(module.named_buffers())
        return params.to(self.device), self._gathered([buffers[n] for n in self.buffer_names])

    def gradient(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        parts, buffers = ModuleObjective.gradient_parts(self, params, buffers, batch)
        return torch.cat(parts), buffers

    def gradient_parts(
        self, params: Tensor, buffers: Buffers, batch: Batch
    ) -> tuple[list[Tensor], Buffers]:
        """Return what `gradient` returns, with the vector in consecutive parts, [n] each.

        The parts share no memory with `params`.
        """
        self.module.train()
        outputs = as_type(self._forward(params, buffers, batch), params.dtype)
        loss = self._losses(outputs, self.fields.targets(batch)).mean()
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        require(
            any(g is not None for g in grads),
            "the loss does not depend on any parameter of the model; does forward use another one?",
        )
        filled = [
            torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.params, strict=True)
        ]
        weights = params.untyped_storage().data_ptr()
        # a backward function of the user may return a weight itself
        parts = [
            part.clone() if part.untyped_storage().data_ptr() == weights else part
            for part in flat_parts(filled)
        ]
        after = [read(slots).detach() for slots in self.slots]
        return parts, self._gathered(after) if after else buffers

    def gradients(
        self, params: Tensor, buffers: Buffers, batch: Batch, valid: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Use `torch.func.vmap`: slower than stacked layers, but it supports nearly every layer."""
        counted = valid.to(params.dtype) / valid.sum(dim=1, keepdim=True)
        one_client = torch.func.grad(self._functional_loss, has_aux=True)
        all_clients = torch.func.vmap(one_client, randomness="different")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            used = {name: batch[name] for name in self.fields.names}
            return all_clients(params, buffers, used, counted)

    def _functional_loss(
        self, params: Tensor, buffers: Buffers, batch: Batch, weights: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Return the loss of one client without touching the module, for `torch.func`."""
        self._functional = self._functional or FunctionalModule(
            self.module, [*self.names, *self.buffer_names], mixed=self.compute_type is not None
        )
        # vmap supports the contiguous memory format only
        plain = torch.contiguous_format
        client_params = [piece.clone(memory_format=plain) for piece in pieces(params, self.params)]
        args, kwargs = self.fields.arguments(batch)
        with self._autocast():
            tensors = client_params + self._copies_of(buffers)
            outputs, tensors = self._functional(tensors, *args, **kwargs)
        losses = self._losses(as_type(outputs, params.dtype), self.fields.targets(batch))
        loss = (losses * weights).sum() if self.per_example else losses
        after = tensors[len(client_params) :]
        return loss, self._gathered(after) if after else buffers

    def stacked(self) -> Stack:
        """Return the model with stacked layers; raises `CannotStackError` where it has none."""
        if self.stack is None:
            has_kernel = self.per_example and self.device.type == "cuda"
            ignored = ignored_target(self.loss) if has_kernel else None
            settings = (self.fields, self.compute_type, ignored)
            self.stack = Stack(self.module, self._losses, *settings)
        return self.stack

    def mixes_examples(self) -> bool:
        normalises = any(isinstance(m, _BatchNorm) for m in self.module.modules())
        return normalises or not self.per_example

    def has_stacked_layers(self) -> bool:
        try:
            return bool(self.stacked())
        except CannotStackError:
            return False

    def row_multiple(self) -> int:
        return 16 if self.device.type == "cuda" else 1

    def evaluate_stacked(self, enabled: bool) -> None:
        self._evaluates_stacked = enabled

    def dense_network(self) -> DenseNetwork | None:
        inputs, label = self.fields.inputs, self.fields.label
        if self.compute_type is not None or not self.per_example:
            return None
        if not isinstance(inputs, tuple) or len(inputs) != 1 or not isinstance(label, str):
            return None
        network = dense_network(self.module, self.loss)
        return network and replace(network, x=inputs[0], y=label)

    def stacked_clients(self, start: Tensor, clients: int) -> StackedClients:
        stack = self.stacked()
        stack.module.train()
        return StackedClients(stack, start, clients)

    def compile_kernels(self, step: Callable[[], object]) -> None:
        if self._compiled or self.device.type != "cuda" or not has_triton():
            return
        self._compiled = True
        log.info("compiling kernels")
        # the draws are of a pass that not every run makes
        with preserved_draws(), compile_in_parallel() as able:
            if able:
                step()

    def measure(self, params: Tensor, buffers: Buffers, batch: Batch) -> dict[str, Tensor]:
        return self.score(*self.predict(params, buffers, batch))

    @torch.no_grad()
    def predict(self, params: Tensor, buffers: Buffers, batch: Batch) -> tuple[Any, Any]:
        """Return outputs, in the type of the parameters, and targets, in evaluation mode."""
        if self._evaluates_stacked and self.stack is not None:
            self.stack.module.eval()
            last = self._evaluated_stacked
            if last is None or last[0] is not params or last[1] != version(params):
                clients = StackedClients(self.stack, params, 1)
                self._evaluated_stacked = last = params, version(params), clients
            outputs = last[2].outputs(batch)
        else:
            self.module.eval()
            outputs = self._forward(params, buffers, batch)
        return as_type(outputs, params.dtype), self.fields.targets(batch)

    @torch.no_grad()
    def score(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
        """Return loss and accuracy of each example, with zeros for targets that are ignored.

        Where the loss is one number for the batch, and is not a mean over targets of classes, every
        example has that number.
        """
        rows = examples_of(targets)
        if self._class_loss() is not None:
            losses = reduced(self.loss, "none")(outputs, targets).reshape(rows, -1).mean(dim=1)
        else:
            losses = self._losses(outputs, targets).expand(rows)
        values = {"loss": losses}
        if self.classifies:
            classes = outputs.argmax(dim=1)
            require(
                classes.numel() == targets.numel(),
                f"outputs {list(outputs.shape)} have no class for each of the labels "
                f"{list(targets.shape)}; pass classifies=False",
            )
            targets = targets.view_as(classes)
            right = (classes == targets).to(widest(classes.device))
            if self.ignore_index is not None:
                right = right * (targets != self.ignore_index)
            values["accuracy"] = right if right.ndim == 1 else right.flatten(1).mean(dim=1)
        return values

    def counted_parts(self, batch: Batch) -> dict[str, Tensor]:
        """Return what each example counts in the loss and the accuracy of a loss of a batch."""
        if self.per_example:
            return {}
        targets, of_classes, parts = self.fields.targets(batch), self._class_loss(), {}
        if of_classes is not None:
            parts["loss"] = of_classes.parts(targets)
        if self.classifies and self.ignore_index is not None:
            parts["accuracy"] = ClassLoss(self.ignore_index, None).parts(targets)
        return parts

    def _class_loss(self) -> ClassLoss | None:
        """Return the settings of a loss of a batch that is a mean over targets of classes."""
        if self.per_example or not self.classifies:
            return None
        is_own = isinstance(self.loss, nn.Module) and (
            type(self.loss) not in (nn.CrossEntropyLoss, nn.NLLLoss) or overrides(self.loss)
        )
        return None if is_own else class_loss(self.loss)

    def _forward(self, params: Tensor, buffers: Buffers, batch: Batch) -> Any:
        """Call the module on copies of what it may write to (`x.mul_()`, `max_norm`).

        In training mode the parameters are the caller's copy, and a step continues from what
        forward makes of them.
        """
        args, kwargs = self.fields.arguments(batch)
        # rows of the data themselves are views
        args = tuple(x if x._base is None else x.clone() for x in args)
        kwargs = {name: x if x._base is None else x.clone() for name, x in kwargs.items()}
        if not self.module.training:
            last = self._evaluated
            if last is None or last[0] is not params or last[1] != version(params):
                self._evaluated = last = params, version(params), params.clone()
            params = last[2]
        self._bind(params, buffers)
        before = [p._version for p in self.params]
        with self._autocast(), self._quiet():
            outputs = self.module(*args, **kwargs)
        if not self.module.training and before != [p._version for p in self.params]:
            self._evaluated = None
        return outputs

    def _built(self) -> nn.Module:
        module = self.build()
        require(
            module is not self.module,
            "the function that builds the model returns the same model at every call; return a new "
            "one, or pass the model itself",
        )
        return module

    def load(self, params: Tensor, buffers: Buffers) -> nn.Module:
        """Return a new module with these parameters and buffers: the trained model.

        What was set is contiguous, as torch builds it, not with channels last as in the vector.
        """
        self._bind(params.clone(), buffers)
        other = self.copy()
        for tensor in (*other.params, *other.averaged, *other.kept):
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        return other.module

    def _autocast(self) -> AbstractContextManager[None]:
        if self.compute_type is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.compute_type)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Let cuDNN compact the weights of recurrent layers at every call without a warning."""
        if self.device.type == "cpu":
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RNN module weights are not part", UserWarning)
            yield

    def _losses(self, outputs: Any, targets: Any) -> Tensor:
        """Return a loss for every example, the mean of those of its outputs; or that of a batch."""
        losses = self.loss(outputs, targets)
        if not self.per_example:
            require(
                losses.ndim == 0,
                f"the loss of a batch has the shape {list(losses.shape)}; return one number",
            )
            return losses
        require(
            losses.ndim >= 1 and len(losses) == examples_of(targets),
            "the loss must give a value for every example; build it with reduction='none'",
        )
        if losses.ndim == 1:
            return losses
        check_shapes(outputs, targets, losses)
        return losses.flatten(1).mean(dim=1)

    def _bind(self, params: Tensor, buffers: Buffers) -> None:
        for target, piece in zip(self.params, pieces(params, self.params), strict=True):
            target.data = piece  # a view, without a copy
        for slots, value in zip(self.slots, self._copies_of(buffers), strict=True):
            put(slots, value)

    def _copies_of(self, buffers: Buffers) -> list[Tensor]:
        """Return the module's buffers in their shapes and types.

        Copies, because forward writes to them, and under vmap only contiguous ones remember it.
        """
        values = pieces(buffers.averaged, self.averaged) + pieces(buffers.kept, self.kept)
        like = [*self.averaged, *self.kept]
        return [v.to(buffer.dtype, copy=True) for v, buffer in zip(values, like, strict=True)]

    def _gathered(self, values: Sequence[Tensor]) -> Buffers:
        averaged, kept = values[: len(self.averaged)], values[len(self.averaged) :]
        integers = flatten([value.long() for value in kept]).long()
        return Buffers(flatten(averaged).to(self.device), integers.to(self.device))


@torch.no_grad()
def _convert(module: nn.Module, target: torch.device | torch.dtype) -> None:
    """Move or convert a module in place; a buffer in two places stays a single tensor."""
    shared = [slots_of(module, buffer) for buffer in module.buffers()]
    if isinstance(target, torch.device):
        module.to(target)
    else:
        module._apply(lambda t: t.to(target) if t.is_floating_point() else t)
    for slots in shared:
        put(slots, read(slots))
