"""Errors that torch raises about the data, as errors that name the data and the remedy.

The engine enters `named_data` once per round, outside of what is captured or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from fedexp.data.federation import Batch
from fedexp.errors import UsageError

SINGLE_EXAMPLE = "more than 1 value per channel"
# of an embedding, and of its stacked implementation
MISSING_INDEX = ("index out of range in self", "is out of bounds for dimension")


@contextmanager
def named_data(splits: Mapping[str, Batch], client: Callable[[], object]) -> Iterator[None]:
    """Raise `UsageError` where BatchNorm meets one example, or an embedding an index it lacks.

    Args:
        splits: the data, by what they are used for.
        client: returns a client that has a batch of one example.
    """
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if SINGLE_EXAMPLE in str(error):
            raise UsageError(
                f"client {client()} has a batch of one example, which BatchNorm cannot normalise; "
                "choose a local.batch_size that leaves no single example, leave such clients out, "
                "or use GroupNorm"
            ) from error
        if not any(text in str(error) for text in MISSING_INDEX):
            raise
        ranges = [
            f"{name} {int(value.min())} to {int(value.max())} ({split})"
            for split, fields in splits.items()
            for name, value in fields.items()
            if not value.is_floating_point() and not value.is_complex()
        ]
        raise UsageError(
            "an embedding of the model has no entry for an index in the data, whose whole numbers "
            f"are {', '.join(ranges)}; raise num_embeddings, or clean the data"
        ) from error
