"""Server rules as the outer optimizer of DiLoCo and local SGD jobs in PyTorch."""

from fedexp.outer.optimizer import OuterOptimizer

__all__ = ["OuterOptimizer"]
