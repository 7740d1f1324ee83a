"""`Fingerprint`: digests of a run's data, initial model and code.

A run's id covers names, options and the number of clients. The same command with other data,
another model or other code has the same id and gives other numbers, so a run folder also stores
digests of its content, and a stored run is reused only if they agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedexp.algorithms import ALGORITHMS, Algorithm
from fedexp.experiment import Experiment
from fedexp.identity import BLOCK_BYTES, attributes_of, digest_of, origin
from fedexp.objective import ModuleObjective, Objective
from fedexp.tasks import Task

# Raise it whenever a release computes other numbers from the same spec, data and model: another
# formula or default inside a rule, other cohorts, batches or augmentation, other initial weights,
# other evaluation. Not for rounding, and not for what options or digests show already.
#   1: runs without a fingerprint.
#   2: FedAdagrad, FedAdam and FedYogi start their accumulator at 0.
#   3: digests have names of the package's classes, and code by its source as well.
NUMERICS = 4
FORMAT = 1
WHOLE_BYTES = 10**9  # of data that are read completely; larger fields are sampled
LONGEST_NAME = 200  # characters
SETTINGS = (bool, int, float, complex, str, bytes, tuple, type(None))


@dataclass(frozen=True)
class Fingerprint:
    """Digests of the content of a run, by the name of what was digested.

    Attributes:
        digests: see `digest_of`.
        numerics: the version of the package's arithmetic, see `NUMERICS`.
    """

    digests: Mapping[str, str]
    numerics: int = NUMERICS

    def differences(self, other: Fingerprint) -> list[str]:
        """Return the names of what differs; empty for the same content."""
        names = dict.fromkeys([*self.digests, *other.digests])
        differing = [n for n in names if self.digests.get(n) != other.digests.get(n)]
        pythons = [{d.partition(" ")[2] for d in f.digests.values()} - {""} for f in (self, other)]
        if all(pythons) and pythons[0].isdisjoint(pythons[1]):
            versions = " and ".join(min(python) for python in pythons)
            differing.append(f"the version of Python that compiles your code ({versions})")
        if self.numerics != other.numerics:
            versions = f"{self.numerics} and {other.numerics}"
            differing.append(f"the numerics version of fedexp ({versions})")
        return differing

    def to_json(self) -> dict[str, Any]:
        """Return the content of `fingerprint.json`."""
        return {"format": FORMAT, "numerics": self.numerics, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, value: Any) -> Fingerprint:
        """Raise `ValueError`, `KeyError` or `TypeError` for anything but a fingerprint."""
        numerics = value["numerics"]
        if value["format"] != FORMAT or type(numerics) is not int or abs(numerics) > 10**9:
            raise ValueError("it is of another format")
        digests = {str(name): str(digest) for name, digest in value["digests"].items()}
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
    stops_by_goal = stops and task.higher is not None
    contents = {
        "the transform": task.transform,
        "the evaluation": task.sums,
        "the clients' shares of the test data": task.test_offsets,
        "the part of an example that counts": task.counted,
        "the goal": str(task.goal) if stops_by_goal else None,
        "the evaluation of every client": task.by_client,
    }
    in_whole = {f"the function {name}": function for name, function in functions.items()}
    in_whole["the metrics"] = dict(task.metrics or {}), task.train_metrics
    digests = {
        **data_digests(task),
        **_objective(task.objective, seed),
        **{name: digest_of(value) for name, value in contents.items()},
        **{name: digest_of(value, whole=True) for name, value in in_whole.items()},
        **fingerprint_of_rules(algorithm).digests,
    }
    return Fingerprint(digests)


def fingerprint_of_rules(algorithm: Algorithm) -> Fingerprint:
    """Digest an algorithm's rules alone, where data and model are not available.

    Fields that are numbers or texts are part of the spec, where 1 and 1.0 are equal.
    """
    digests = {}
    for part in ("client", "server"):
        rule = getattr(algorithm, part)
        kind: Any = type(rule)
        if origin(kind.__module__) == "fedexp":  # the first algorithm that has it names it
            names = (n for n, make in ALGORITHMS.items() if type(getattr(make(), part)) is kind)
            kind = next(names, "")
        digests[f"the {part} rule"] = digest_of(kind, _not_in_spec(rule), whole=True)
    return Fingerprint(digests)


def fingerprint_of_object(value: Any) -> Fingerprint:
    """Digest what a spec refers to: a task with its settings, an algorithm or a function."""
    if not isinstance(value, Task):
        rules = fingerprint_of_rules(value).digests if isinstance(value, Algorithm) else {}
        return Fingerprint({**rules, "the object": digest_of(value, whole=True)})
    parts = ("objective", "train", "test")
    names = [field.name for field in dataclasses.fields(value) if field.name not in parts]
    settings = digest_of({name: getattr(value, name) for name in names}, whole=True)
    model = _objective(value.objective, 0)
    return Fingerprint({**data_digests(value), **model, "the settings of the task": settings})


def _not_in_spec(rule: Any) -> dict[str, Any]:
    """Return the attributes of a rule that the options of a spec do not have, or only in part."""
    fields = {field.name for field in dataclasses.fields(rule)}
    plain, named = bool | int | float | str | None, attributes_of(rule).items()
    return {n: value for n, value in named if n not in fields or not isinstance(value, plain)}


def joined(names: list[str]) -> str:
    """Join names for a sentence.

    >>> joined(["x"]), joined(["x", "y", "z"])
    ('x', 'x, y and z')
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _objective(objective: Objective, seed: int) -> dict[str, str]:
    if isinstance(objective, ModuleObjective):
        module = objective.initial_module(seed)
        return {
            "the inputs": digest_of(objective.fields),
            "the initial weights": digest_of(dict(module.named_parameters()), whole=True),
            "the initial buffers": digest_of(dict(module.named_buffers())),
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
        "the initial weights": digest_of(params, whole=True),
        "the initial buffers": digest_of(buffers),
        "the objective": digest_of(type(objective), settings),
    }


def data_digests(task: Task) -> dict[str, str]:
    """Digest training and test data, once for all runs of this process that share them.

    Small fields first, so that labels are read completely; of large ones some rows are read.
    Tensors have a version counter, so data that were changed in place are read again. It does not
    count what numpy writes: tensors over memory that is not torch's (of arrays, of mapped files)
    are read for every run. `Federation.from_ids` and `from_parts` copy, so that training data
    seldom are; test arrays are, and a copy of each would not be shared by processes.
    """
    train = {f"the training data ({n})": value for n, value in task.train.fields.items()}
    fields = train | {f"the test data ({n})": value for n, value in (task.test or {}).items()}
    digests = {"the clients' shares of the data": digest_of(task.train.offsets)}
    left = WHOLE_BYTES
    for name, value in sorted(fields.items(), key=lambda field: field[1].nbytes):
        whole = value.nbytes <= left
        left -= value.nbytes if whole else 0
        ends = task.train.offsets if name in train and not whole else np.array([0, len(value)])
        # nobody else can write to memory that torch may resize
        is_counted = not value.is_inference() and value.untyped_storage().resizable()
        version = value._version if is_counted else object(), whole, digest_of(ends)
        if value not in _digests or _digests[value][0] != version:
            _digests[value] = version, digest_of(value) if whole else _sampled(value, ends)
        digests[name] = _digests[value][1]
    return digests


_digests: Any = WeakTensorKeyDictionary()  # versions and digests of data


def _sampled(value: Tensor, ends: NDArray[np.int64]) -> str:
    """Digest some rows of every client: first, last and equally spaced ones between."""
    row_bytes = max(1, value.nbytes // max(1, len(value)))
    rows = _sample(ends, max(1, WHOLE_BYTES // (row_bytes * (len(ends) - 1))))
    together = max(1, BLOCK_BYTES // row_bytes)
    chosen = torch.from_numpy(rows).to(value.device).split(together)
    blocks = [digest_of(value[rows_of_block]) for rows_of_block in chosen]
    return digest_of(value.shape, len(rows), blocks)


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
