"""Federated data: the container and the partitions."""

from fedexp.data import partition
from fedexp.data.datasets import load
from fedexp.data.federation import Batch, Federation
from fedexp.data.images import Images
from fedexp.data.splits import RawSplits
from fedexp.data.transform import Transform

__all__ = ["Batch", "Federation", "Images", "RawSplits", "Transform", "load", "partition"]
