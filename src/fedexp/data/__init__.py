"""Federated data: the container, partitions, transforms and the published data sets."""

from fedexp.data.datasets import RawSplits, load
from fedexp.data.federation import Batch, Federation
from fedexp.data.transforms import Images, Transform

__all__ = ["Batch", "Federation", "Images", "RawSplits", "Transform", "load", "partition"]
