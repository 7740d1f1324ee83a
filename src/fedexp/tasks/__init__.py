"""Tasks that need no download. Each is a function that returns a `Task`."""

from fedexp.tasks.regression import linear_regression, synthetic, toy
from fedexp.tasks.task import Task

__all__ = ["Task", "linear_regression", "synthetic", "toy"]
