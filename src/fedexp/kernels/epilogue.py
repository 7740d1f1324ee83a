"""`epilogue`: what follows a layer with weights, in one pass: bias, ReLU, max-pooling, dropout.

The product of a convolution or a dense layer is read once and the result written once, instead of
once per operation. The backward pass reads the product again and recomputes the mask of the ReLU,
the place of each maximum and the draws of the dropout, so that nothing else is stored. On a GPU
both are one Triton kernel (`epilogue_triton`); `plain_epilogue` is their twin in plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedexp.kernels.launch import differentiable, has_triton

MOST_POOLED = 4  # larger windows would take too many registers


@dataclass(frozen=True)
class Epilogue:
    """The operations after a layer with weights, in this order, after its bias.

    Attributes:
        relu: apply ReLU.
        pool: side and stride of max-pooling windows; 1 for none.
        dropout: the probability of dropout while training.
        follows: how many modules of a Sequential it stands for.
    """

    relu: bool = False
    pool: int = 1
    dropout: float = 0.0
    follows: int = 0

    @property
    def is_relu(self) -> bool:
        """Whether it is a ReLU and nothing else."""
        return self.relu and self.pool == 1 and self.dropout == 0.0


def epilogue_of(following: list[nn.Module], images: bool) -> Epilogue:
    """Return the epilogue that the first of these modules form, as many of them as possible.

    Max-pooling and ReLU commute, so either may come first; dropout ends an epilogue. Modules with
    hooks, and pooling with padding, dilation or overlapping windows, are none.

    Args:
        following: the modules after a layer, in the order of their calls.
        images: whether the layer is a convolution.

    >>> epilogue_of([nn.ReLU(), nn.Dropout(0.25), nn.Flatten()], images=False)
    Epilogue(relu=True, pool=1, dropout=0.25, follows=2)
    """
    relu, pool = False, 1
    for number, module in enumerate(following):
        if has_hooks(module):
            return Epilogue(relu, pool, 0.0, number)
        if type(module) is nn.ReLU and not relu:
            relu = True
        elif type(module) is nn.MaxPool2d and images and pool == 1 and _side(module):
            pool = _side(module)
        elif type(module) is nn.Dropout and 0.0 <= module.p < 1.0:
            return Epilogue(relu, pool, module.p, number + 1)
        else:
            return Epilogue(relu, pool, 0.0, number)
    return Epilogue(relu, pool, 0.0, len(following))


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of a module does more than its forward."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def _side(pool: nn.MaxPool2d) -> int:
    """Return the side of windows that neither overlap nor have gaps; 0 for others."""
    side = pool.kernel_size
    plain = pool.stride == side and pool.padding == 0 and pool.dilation == 1
    plain = plain and not pool.ceil_mode and not pool.return_indices
    return side if isinstance(side, int) and plain and 1 < side <= MOST_POOLED else 0


def epilogue(product: Tensor, bias: Tensor | None, what: Epilogue, training: bool) -> Tensor:
    """Return the epilogue of images [K * B, C, H, W] or rows [K, B, C]; `bias` is [K, C].

    >>> epilogue(torch.tensor([[[1.0, -3.0]]]), torch.ones(1, 2), Epilogue(relu=True), True)
    tensor([[[2., 0.]]])
    """
    dropout = what.dropout if training else 0.0
    if bias is None and not what.relu and what.pool == 1 and not dropout:
        return product
    if product.is_cuda and product.dtype != torch.float64 and has_triton():
        from fedexp.kernels.epilogue_triton import FusedEpilogue

        return differentiable(FusedEpilogue, product, bias, what.relu, what.pool, dropout)
    return plain_epilogue(product, bias, what, training)


def plain_epilogue(product: Tensor, bias: Tensor | None, what: Epilogue, training: bool) -> Tensor:
    """Return what `epilogue` does, in plain PyTorch; in float32 or wider, as the kernel does."""
    dtype = product.dtype
    product = product.to(torch.promote_types(dtype, torch.float32))
    if bias is not None and product.ndim == 4:
        each = len(product) // len(bias)
        product = product + bias.repeat_interleave(each, dim=0)[:, :, None, None]
    elif bias is not None:
        product = product + bias[:, None]
    product = product.relu() if what.relu else product
    product = F.max_pool2d(product, what.pool) if what.pool > 1 else product
    product = F.dropout(product, what.dropout, training) if what.dropout else product
    return product.to(dtype)
