"""Models as users build them: which ones are refused, and what a copy of one keeps."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fedexp.errors import UsageError, first_line, require
from fedexp.identity import HOOKS, parts
from fedexp.objective.hidden_state import check_aliases

OLD_NORMS = (WeightNorm, SpectralNorm)  # hooks with a weight that is not a parameter


def built_model(build: Any) -> nn.Module:
    """Return a model; refuse what is not a function that builds one."""
    require(
        callable(build),
        f"the model is {type(build).__name__}; pass a function that builds it, e.g. lambda: Net()",
    )
    try:
        module = build()
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # inside the function, not for want of arguments
        raise UsageError(
            f"the model cannot be built without arguments: {first_line(error)}; pass a function, "
            "e.g. lambda: Net(classes=10)"
        ) from error
    require(
        isinstance(module, nn.Module),
        f"the function that builds the model returns {type(module).__name__}, not an nn.Module",
    )
    return cast(nn.Module, module)


def has_constants(module: nn.Module) -> bool:
    """Return whether a module has tensors that are neither trained nor averaged."""
    frozen = any(not p.requires_grad for p in module.parameters())
    return frozen or any(b.is_complex() for b in module.buffers())


def check_trainable(module: nn.Module) -> None:
    """Refuse, in one line with the remedy, models that torch would fail on somewhere in a round."""
    lazy = next((n for n, p in module.named_parameters() if nn.parameter.is_lazy(p)), None)
    require(
        lazy is None,
        f"{lazy} has no shape yet; run one batch through the model where it is built, or use a "
        "layer that is not lazy",
    )
    for name, layer in module.named_modules():
        require(
            not isinstance(layer, nn.Embedding | nn.EmbeddingBag) or not layer.sparse,
            f"the embedding {name!r} has sparse gradients, which cannot be summed; build it with "
            "sparse=False",
        )
        hooks = layer._forward_pre_hooks.values()
        require(
            not any(isinstance(hook, OLD_NORMS) for hook in hooks),
            f"{name or type(layer).__name__} uses torch.nn.utils.weight_norm or spectral_norm, "
            "which cannot be copied; use the one of torch.nn.utils.parametrizations instead",
        )
    trained = [p for p in module.parameters() if p.requires_grad]
    require(
        not any(p._post_accumulate_grad_hooks for p in trained),
        "hooks after the accumulation of gradients are not called here; use Tensor.register_hook",
    )
    check_aliases(module)
    complex_names = (n for n, p in module.named_parameters() if p.requires_grad and p.is_complex())
    complex_name = next(complex_names, None)
    require(
        complex_name is None,
        f"{complex_name} is complex, and sums of updates are real; make it a real parameter of "
        "shape [..., 2], e.g. torch.view_as_real(w), and call torch.view_as_complex in forward",
    )
    types = {str(p.dtype).removeprefix("torch.") for p in trained}
    require(
        len(types) <= 1,
        f"the parameters are of several types ({', '.join(sorted(types))}); convert the model, "
        "e.g. with model.float()",
    )


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the `state_dict` of a module, and the buffers that are in none (persistent=False)."""
    return {**dict(module.named_buffers()), **module.state_dict()}


def is_copied_whole(module: nn.Module) -> bool:
    """Return whether `deepcopy` makes a model that is independent of this one and behaves like it.

    It drops hooks of tensors, functions that refer to the model still refer to this one, and
    results that forward has left in attributes cannot be copied.
    """
    if any(p._backward_hooks for p in module.parameters()):
        return False
    for layer in module.modules():
        values = list(vars(layer).values())
        if any(isinstance(value, Tensor) and not value.is_leaf for value in values):
            return False
        functions = [value for value in values if callable(value)]
        for name in HOOKS:
            functions += vars(layer).get(name, {}).values()
        referents = [value for function in functions for value in _referents(function)]
        if any(isinstance(value, nn.Module) or _is_trained(value) for value in referents):
            return False
    return True


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _referents(function: Any) -> list[Any]:
    """Return what a function, or a partial function, holds and the globals that it reads."""
    if isinstance(function, partial):
        return [*function.args, *function.keywords.values(), *_referents(function.func)]
    if not isinstance(function, FunctionType):
        return []
    return [value for _, value in parts(function) or ()]


def refers_to_weights(loss: Any) -> bool:
    """Return whether a loss has or refers to tensors that could be trained."""
    values = [loss, *_referents(loss)]
    weights = [p for value in values if isinstance(value, nn.Module) for p in value.parameters()]
    return any(map(_is_trained, (*weights, *values)))


def disable_dropout(module: nn.Module) -> None:
    """Set the probability of every dropout to zero, those inside other layers included."""
    for layer in module.modules():
        if isinstance(layer, _DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
