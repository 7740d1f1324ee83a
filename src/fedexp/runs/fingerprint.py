"""`Fingerprint`: digests of a run's data, initial model and code.

A run's id covers names, options and the number of clients. The same command with other data,
another model or other code has the same id and gives other numbers, so a run folder also stores
digests of its content, and a stored run is reused only if they agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedexp.algorithms import Algorithm
from fedexp.data.federation import Batch, Federation
from fedexp.experiment import Experiment
from fedexp.identity import BYTES, Digest, attributes_of, digest_of, is_library, same, tensor_bytes
from fedexp.objective import ModuleObjective, Objective
from fedexp.objective.base import DEFAULT_FIELDS
from fedexp.tasks import Task

# Raise it whenever a release computes other numbers from the same spec, data and model: another
# formula or default inside a rule, other cohorts, batches or augmentation, other initial weights,
# other evaluation. Not for rounding, and not for what options or digests show already.
#   1: runs without a fingerprint.
#   2: FedAdagrad, FedAdam and FedYogi start their accumulator at 0.
NUMERICS = 3
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
    """

    digests: Mapping[str, Digest]
    numerics: int = NUMERICS

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


_fingerprints: WeakKeyDictionary[Experiment, Fingerprint] = WeakKeyDictionary()


def fingerprint_of(experiment: Experiment) -> Fingerprint:
    """Return digests of the data, the initial model and the code of a run, computed once."""
    if experiment not in _fingerprints:
        setup, cohort = experiment.setup, experiment.resolved.cohort
        functions = {f"local.{n}": v for n, v in vars(setup.local).items() if callable(v)}
        if callable(cohort):
            functions["cohort"] = cohort
        stops = experiment.stop_at is not None
        _fingerprints[experiment] = fingerprint(
            experiment.problem, setup.algorithm, experiment.seed, functions, stops
        )
    return _fingerprints[experiment]


def fingerprint(
    task: Task,
    algorithm: Algorithm,
    seed: int,
    functions: Mapping[str, Any] = MappingProxyType({}),
    stops: bool = False,
) -> Fingerprint:
    """Digest the content of a run: its data, its initial model and the code behind it.

    Args:
        task: the task.
        algorithm: the rules.
        seed: of the run.
        functions: the user's own among the options, by the name of the option.
        stops: whether the run ends early by the task's goal.
    """
    digests = {
        **data_digests(task),
        **_objective(task.objective, seed),
        "the transform": digest_of(task.transform),
        "the evaluation": digest_of(task.sums),
    }
    if task.test_offsets is not None:
        shares = {"offsets": torch.from_numpy(task.test_offsets)}
        digests["the clients' shares of the test data"] = _tensors(shares)
    if task.counted is not None:
        digests["the part of an example that counts"] = digest_of(task.counted)
    if task.metrics:
        digests["the metrics"] = digest_of(dict(task.metrics), task.train_metrics, whole=True)
    if stops and task.higher is not None:  # a goal of the user's own
        digests["the goal"] = digest_of(str(task.goal))
    if task.by_client:
        digests["the evaluation of every client"] = digest_of(task.by_client)
    for name, function in functions.items():
        digests[f"the function {name}"] = digest_of(function, whole=True)
    of_rules = fingerprint_of_rules(algorithm)
    return replace(of_rules, digests={**digests, **of_rules.digests})


def fingerprint_of_rules(algorithm: Algorithm) -> Fingerprint:
    """Digest an algorithm's rules alone, where data and model are not available.

    Fields that are numbers or texts are part of the spec, where 1 and 1.0 are equal.
    """
    rules = {"the client rule": algorithm.client, "the server rule": algorithm.server}
    return Fingerprint(
        {name: digest_of(type(r), _not_in_spec(r), whole=True) for name, r in rules.items()}
    )


def fingerprint_of_object(value: Any) -> Fingerprint:
    """Digest what a spec refers to: a task with its settings, an algorithm or a function."""
    if not isinstance(value, Task):
        return Fingerprint({"the object": digest_of(value, whole=True)})
    parts = ("objective", "train", "test")
    names = [field.name for field in dataclasses.fields(value) if field.name not in parts]
    settings = digest_of({name: getattr(value, name) for name in names}, whole=True)
    own = _objective(value.objective, 0)
    return Fingerprint({**data_digests(value), **own, "the settings of the task": settings})


def _not_in_spec(rule: Any) -> dict[str, Any]:
    """Return the attributes of a rule that the options of a spec do not have, or only in part."""
    fields = {field.name for field in dataclasses.fields(rule)}
    own = attributes_of(rule)
    if is_library(type(rule).__module__):
        own = {name: value for name, value in own.items() if name in fields}
    in_spec = {n for n in fields if isinstance(own.get(n), bool | int | float | str | None)}
    return {name: own[name] for name in sorted(own.keys() - in_spec)}


def joined(names: list[str]) -> str:
    """Join names for a sentence.

    >>> joined(["x"]), joined(["x", "y", "z"])
    ('x', 'x, y and z')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _objective(objective: Objective, seed: int) -> dict[str, Digest]:
    if isinstance(objective, ModuleObjective):
        module = objective.initial_module(seed)
        fields = (
            {} if objective.fields == DEFAULT_FIELDS else {"the inputs": vars(objective.fields)}
        )
        return {
            **{name: digest_of(value) for name, value in fields.items()},
            "the initial weights": _tensors(dict(module.named_parameters())),
            "the initial buffers": _tensors(dict(module.named_buffers())),
            "the code or the layers of the model": digest_of(objective.build, module),
            "the loss": digest_of(objective.loss, objective.classifies, whole=True),
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


def data_digests(task: Task) -> dict[str, Digest]:
    """Digest training and test data, once for all runs of this process that share them.

    Tensors have a version counter, so data that were changed in place are read again. It does not
    count what numpy writes: tensors over memory that is not torch's (of arrays, of mapped files)
    are read for every run. `Federation.from_ids` and `from_parts` copy, so that training data
    seldom are; test arrays are, and a copy of each would not be shared by processes.
    """
    fields = {f"the training data ({n})": value for n, value in task.train.fields.items()}
    fields |= {f"the test data ({n})": value for n, value in (task.test or {}).items()}
    versions = {name: _version(value) for name, value in fields.items()}
    found = _known.get(task.train)
    if found is None or found.test is not task.test:
        found = _Data(task.test, {}, {})
    unchanged = {n for n, v in versions.items() if v is not None and found.versions.get(n) == v}
    known = {name: found.digests[name] for name in unchanged}
    digests = dict(_read(fields, task.train.offsets, known))
    _known[task.train] = _Data(task.test, versions, digests)
    return digests


def _version(value: Tensor) -> int | None:
    """Return a number that changes with a tensor; None where others can write to its memory."""
    if not value.is_inference() and value.untyped_storage().resizable():
        return value._version
    return None


@dataclass(frozen=True)
class _Data:
    test: Batch | None
    versions: Mapping[str, int | None]
    digests: dict[str, Digest]


_known: WeakKeyDictionary[Federation, _Data] = WeakKeyDictionary()


def _read(
    fields: Mapping[str, Tensor], offsets: NDArray[np.int64], known: Mapping[str, Digest]
) -> Iterator[tuple[str, Digest]]:
    """Digest every field that is not known, small ones first: labels are always read completely."""
    yield "the clients' shares of the data", _tensors({"offsets": torch.from_numpy(offsets)})
    left = WHOLE_BYTES
    for name, value in sorted(fields.items(), key=lambda field: field[1].nbytes):
        whole = value.nbytes <= left
        left -= value.nbytes if whole else 0
        if name in known:
            yield name, known[name]
        elif whole:
            yield name, _tensors({"": value})
        else:
            train = name.startswith("the training data")
            yield name, _sampled(value, offsets if train else np.array([0, len(value)]))


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
