"""`Fingerprint`: digests of a run's data, initial model and code.

A run's id covers names, options and the number of clients. The same command with other data,
another model or other code has the same id and gives other numbers, so a run folder also stores
digests of its content, and a stored run is reused only if they agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.data.federation import Batch, Federation
from fedexp.objective import ModuleObjective, Objective
from fedexp.runs.code_digest import BYTES, Digest, digest_of, same, tensor_bytes
from fedexp.server import Adagrad, Adam
from fedexp.tasks import Task

# Raise it whenever a release computes other numbers from the same spec, data and model: another
# formula or default inside a rule, other cohorts, batches or augmentation, other initial weights,
# other evaluation. Not for rounding, and not for what options or digests show already.
#   1: runs without a fingerprint.
#   2: FedAdagrad, FedAdam and FedYogi start their accumulator at 0.
NUMERICS = 2
FORMAT = 1
WHOLE_BYTES = 10**9  # of data that are read completely; larger fields are sampled
BLOCK_BYTES = 2**24  # hashed or sampled at a time
LONGEST_NAME = 200  # characters
CONTENT = "content"  # the key of a tensor's digest; those of code have a key per view
SETTINGS = (bool, int, float, complex, str, bytes, tuple, type(None))


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the content of a run, by the name of what was digested.

    Attributes:
        digests: of data and weights under one key, of code by source and by bytecode.
        numerics: the version of the package's arithmetic, see `NUMERICS`.
        first: the oldest version with today's numbers for this algorithm; not stored. It decides
            about runs without a fingerprint.
    """

    digests: Mapping[str, Digest]
    numerics: int = NUMERICS
    first: int = 1

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of what differs; empty for the same content."""
        names = dict.fromkeys([*self.digests, *other.digests])
        apart = [n for n in names if not same(self.digests.get(n, {}), other.digests.get(n, {}))]
        if self.numerics != other.numerics:
            versions = f"{self.numerics} and {other.numerics}"
            apart.append(f"the numerics version of fedexp ({versions})")
        return apart

    def to_json(self) -> dict[str, Any]:
        """Return the content of `fingerprint.json`."""
        return {"format": FORMAT, "numerics": self.numerics, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, value: Any) -> Fingerprint:
        """Raise `ValueError`, `KeyError` or `TypeError` for anything but a fingerprint."""
        numerics = value["numerics"]
        if value["format"] != FORMAT or type(numerics) is not int or abs(numerics) > 10**9:
            raise ValueError("it is of another format")
        digests = {str(name): dict(each) for name, each in value["digests"].items()}
        if not all(name.isprintable() and len(name) <= LONGEST_NAME for name in digests):
            raise ValueError("a name is not printable")
        return cls(digests, numerics)


def fingerprint(task: Task, algorithm: Algorithm, seed: int) -> Fingerprint:
    """Digest the content of a run: its data, its initial model and the code behind it."""
    digests = {
        **_data(task),
        **_objective(task.objective, seed),
        "the transform": digest_of(task.transform),
        "the evaluation": digest_of(task.sums),
    }
    of_rules = fingerprint_of_rules(algorithm)
    return replace(of_rules, digests={**digests, **of_rules.digests})


def fingerprint_of_rules(algorithm: Algorithm) -> Fingerprint:
    """Digest the code of an algorithm's rules alone, where data and model are not available.

    Their options are part of the spec.
    """
    digests = {
        "the client rule": digest_of(type(algorithm.client)),
        "the server rule": digest_of(type(algorithm.server)),
    }
    return Fingerprint(digests, first=2 if isinstance(algorithm.server, Adagrad | Adam) else 1)


def joined(names: list[str]) -> str:
    """Join names for a sentence.

    >>> joined(["x"]), joined(["x", "y", "z"])
    ('x', 'x, y and z')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _objective(objective: Objective, seed: int) -> dict[str, Digest]:
    if isinstance(objective, ModuleObjective):
        module = objective.initial_module(seed)
        return {
            "the initial weights": _tensors(dict(module.named_parameters())),
            "the initial buffers": _tensors(dict(module.named_buffers())),
            "the code or the layers of the model": digest_of(objective.build, module),
            "the loss": digest_of(objective.loss, objective.classifies),
        }
    params, buffers = objective.initial(seed)
    settings = {
        name: value
        for name, value in sorted(vars(objective).items())
        if name[:1] != "_" and (isinstance(value, SETTINGS) or callable(value))
    }
    return {
        "the initial weights": _tensors({"params": params}),
        "the initial buffers": _tensors(buffers._asdict()),
        "the objective": digest_of(type(objective), settings),
    }


def _tensors(named: Mapping[str, Tensor]) -> Digest:
    """Digest tensors with their names, shapes and types."""
    digest = _hash()
    for name, value in named.items():
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        _feed(digest, tensor_bytes(value))
    return {CONTENT: digest.hexdigest()}


def _feed(digest: hashlib.blake2b, data: memoryview) -> None:
    """Hash blocks on all cores, and then their hashes."""
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    if len(blocks) <= 1:
        digest.update(data)
        return
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for each in pool.map(lambda block: _hash(block).digest(), blocks):
            digest.update(each)


def _hash(data: bytes | memoryview = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=BYTES)


def _data(task: Task) -> dict[str, Digest]:
    """Digest training and test data, once for all runs of this process that share them.

    Tensors have a version counter, so data that were changed in place are read again.
    """
    tensors = [*task.train.fields.values(), *(task.test or {}).values()]
    changes = [0 if value.is_inference() else value._version for value in tensors]
    found = _known.get(task.train)
    if found is None or found.test is not task.test or found.changes != changes:
        found = _Data(task.test, changes, dict(_read(task.train, task.test)))
        _known[task.train] = found
    return found.digests


@dataclass(frozen=True)
class _Data:
    test: Batch | None
    changes: list[int]
    digests: dict[str, Digest]


_known: WeakKeyDictionary[Federation, _Data] = WeakKeyDictionary()


def _read(train: Federation, test: Batch | None) -> Iterator[tuple[str, Digest]]:
    """Digest every field, small ones first, so that labels are always read completely."""
    yield "the clients' shares of the data", _tensors({"offsets": torch.from_numpy(train.offsets)})
    fields = [(f"the training data ({n})", v, train.offsets) for n, v in train.fields.items()]
    for name, value in (test or {}).items():
        fields.append((f"the test data ({name})", value, np.array([0, len(value)])))
    left = WHOLE_BYTES
    for name, value, ends in sorted(fields, key=lambda field: field[1].nbytes):
        if value.nbytes <= left:
            left -= value.nbytes
            yield name, _tensors({"": value})
        else:
            yield name, _sampled(value, ends)


def _sampled(value: Tensor, ends: NDArray[np.int64]) -> Digest:
    """Digest some rows of every client: first, last and equally spaced ones between."""
    row_bytes = max(1, value.nbytes // max(1, len(value)))
    rows = _sample(ends, max(1, WHOLE_BYTES // (row_bytes * (len(ends) - 1))))
    digest = _hash()
    digest.update(f"{value.dtype} {tuple(value.shape)} {len(rows)}\n".encode())
    together = max(1, BLOCK_BYTES // row_bytes)
    for at in range(0, len(rows), together):
        chosen = torch.from_numpy(rows[at : at + together]).to(value.device)
        digest.update(tensor_bytes(value[chosen]))
    return {CONTENT: digest.hexdigest()}


def _sample(ends: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most `most` rows of every client, in order.

    >>> _sample(np.array([0, 2, 10]), 3).tolist()
    [0, 1, 2, 5, 9]
    """
    sizes = np.diff(ends)
    counts = np.minimum(sizes, most)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    steps = np.repeat(np.maximum(counts - 1, 1), counts)
    within = (np.arange(counts.sum()) - starts) * np.repeat(sizes - 1, counts) // steps
    return np.repeat(ends[:-1], counts) + within
