"""`SharedPrograms`: data, trials, engines and CUDA graphs that runs of one process share.

Seeds, algorithms and grid points of a comparison differ in a few numbers. They can share

- the examples on the device: copied once per task, and overwritten by those of a task of the same
  shapes, e.g. of another partition, since a captured CUDA graph reads them from where they were;
- the trial of an engine against the loop, where all that decides its outcome is equal;
- engines with their CUDA graphs, where everything is equal that is a constant of the program.

The learning rate, the seed, the cohort, weights and states are inputs of a program. All else is a
constant, so it is part of a key (`key_of`), by value: the settings of the rules, of local
training and of the transform, the layers, the loss and every tensor of the model that is not
trained. What cannot be compared by value is compared by identity. Runs with different keys share no
engine, so that a run gives the numbers that it gives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import numpy as np
import torch
from torch import Tensor

from fedexp.client import Tensors
from fedexp.data.federation import Batch, Federation
from fedexp.data.streaming import StreamedFederation, on_device
from fedexp.engine.base import Engine
from fedexp.engine.batched import Batched, Capture
from fedexp.engine.cuda_graph import CapturedGraph, Program, RepeatedProgram, capture_graph
from fedexp.engine.plan import Work, step_lengths
from fedexp.engine.state import SimulationState
from fedexp.identity import Identity, key_of
from fedexp.objective import ComparableObjective, CopyableObjective, Objective
from fedexp.objective.base import version
from fedexp.precision import Precision
from fedexp.tasks.task import Task

MOST_EVALUATIONS = 4  # with their CUDA graphs
MOST_TRIALS = 48
MOST_ENGINES = 12  # with their CUDA graphs; then the one that was used least recently is dropped


class SharedPrograms:
    """Examples, trials, engines and CUDA graphs of the runs of one process.

    Pass one object to all runs that may share them, one after another. The task of a record is
    valid until the next run begins: examples of another partition overwrite it.

    Args:
        graphs: replay programs, and copy the examples, as on a GPU; None for on a GPU only.
        capture: captures a program, see `Batched`.
        most: number of engines that are kept.

    Attributes:
        trials: number of trials against the loop.
        captures: number of captured programs.
        copies: number of times that examples were copied to the device.
    """

    def __init__(
        self,
        graphs: bool | None = None,
        capture: Capture | None = None,
        most: int = MOST_ENGINES,
    ) -> None:
        self.trials = self.captures = self.copies = 0
        self._graphs, self._most = graphs, most
        self._capture_graph = capture or self._cuda_graph
        self._agreed: dict[Hashable, None] = {}  # in the order of the trials
        self._engines: dict[Hashable, _SharedEngine] = {}  # the one used last is the last
        self._evaluations: dict[Hashable, RepeatedProgram] = {}  # likewise
        self._layout: Hashable = None
        self._storage: _Storage | None = None
        self._train: Federation | None = None  # the partition of the storage that was placed last
        # of the examples that `place` returned: what they are copies of, and where
        self._sources = WeakKeyDictionary[Federation, tuple[_Source, _Storage]]()
        self._live = WeakSet[CapturedGraph]()
        self._pool: Any = None

    def clear(self) -> None:
        """Drop everything, e.g. before a run of another task."""
        self._agreed.clear()
        self._engines.clear()
        self._evaluations.clear()
        self._storage = self._train = self._layout = None

    def drop_data(self) -> None:
        """Drop what refers to examples of the caller: data may fit in memory only once."""
        self._engines = {k: shared for k, shared in self._engines.items() if shared.train is None}

    # Examples -----------------------------------------------------------------------------------

    def place(self, task: Task, device: torch.device, precision: Precision | None) -> Task:
        """Return the task on a device, with a new objective and shared examples.

        The caller keeps `task` until the run is over: `load` may have to copy its examples again.

        Args:
            task: the task of a run.
            device: where to train.
            precision: of the arithmetic; None for a task that is trained as it is, where it is.
        """
        train, test = self._place_examples(task, device)
        placed = replace(task, train=train, test=test)
        if precision is not None:
            return replace(placed.to(device, precision), train=train, test=test)
        if isinstance(task.objective, CopyableObjective):  # a run may leave it with a state
            return replace(placed, objective=task.objective.copy())
        return task if train is task.train else placed

    def _place_examples(self, task: Task, device: torch.device) -> tuple[Federation, Batch | None]:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        source = _Source.of(task)
        if not self._graphs and all(value.device == device for value in source.tensors()):
            return task.train, task.test
        layout = (device, task.name, type(task.train), source.layout)
        if layout != self._layout:
            self.clear()
            self._layout = layout
        if self._storage is None:
            train = on_device(task.train, device)
            test = task.test and {name: value.to(device) for name, value in task.test.items()}
            if isinstance(train, StreamedFederation):
                return train, test
            test = None if test is None or task.test is None else _copied(test, task.test)
            self._storage = _Storage(_copied(train.fields, task.train.fields), test, source)
            self.copies += 1
        if self._train is None or not self._sources[self._train][0].is_same(source):
            self._train = replace(task.train, fields=self._storage.fields, finite=True)
            self._sources[self._train] = source, self._storage
        return self._train, self._storage.test

    def load(self, task: Task) -> None:
        """Make sure that the examples on the device are those of a task that `place` returned."""
        source, storage = self._sources.get(task.train, (None, None))
        if source is None or storage is None or source.is_same(storage.loaded):
            return
        targets = [*storage.fields.values(), *(storage.test or {}).values()]
        for target, value in zip(targets, source.tensors(), strict=True):
            target.copy_(value)
        storage.loaded = source
        self.copies += 1

    # Trials and engines -------------------------------------------------------------------------

    @staticmethod
    def trial_key(
        candidate: tuple[str, ...], work: Work, state: SimulationState, precision: Precision
    ) -> Hashable:
        """Return what decides whether an engine agrees with the loop.

        Args:
            candidate: names the engine and its implementation.
            work: the first round.
            state: the state before it.
            precision: of the run.
        """
        task, params = work.task, state.params
        lengths = step_lengths(task.train.sizes[work.cohort], work.local)
        return (
            candidate,
            task.name,
            objective_key(task.objective),
            key_of(work.algorithm.client),
            key_of(_without_inputs(work)),
            key_of(task.transform),
            precision,
            (params.shape, params.dtype, params.device),
            tuple((n, v.shape[1:], v.dtype) for n, v in task.train.fields.items()),
            (len(work.cohort), int(lengths.max()), bool((lengths == 1).any())),
            _flags(),
            torch.get_num_threads(),
        )

    def has_agreed(self, key: Hashable) -> bool:
        """Return whether an earlier run has shown that the engine agrees with the loop."""
        return key in self._agreed

    def note_agreement(self, key: Hashable, tried: bool = True) -> None:
        """Store that an engine agrees with the loop; `tried` if a trial has just shown it."""
        self.trials += tried
        self._agreed[key] = None
        while len(self._agreed) > MOST_TRIALS:  # a key may hold a model
            del self._agreed[next(iter(self._agreed))]

    def engine(
        self, trial: Hashable, make: Callable[[Work], Engine], layers: bool, work: Work
    ) -> Engine:
        """Return the engine of an earlier run, or a new one; `prepared` returns the task for it.

        Args:
            trial: key of its trial.
            make: returns a new engine.
            layers: whether it evaluates by stacked layers, which others must not.
            work: the first round.
        """
        task = work.task
        model = (objective_key(task.objective), layers)
        made = make(work)
        # a captured graph reads the examples of the storage, or gets those of a cohort as inputs;
        # other engines may hold results of the data
        streamed = isinstance(task.train, StreamedFederation)
        storage = self._sources.get(task.train, (None, None))[1]
        fixed = isinstance(made, Batched) and (storage is not None or streamed)
        train = None if fixed else task.train
        key = (
            trial,
            made.name,
            Identity(storage if fixed else train),
            key_of(None if fixed else list(task.train.fields.values())),
            key_of(work.algorithm.server),
            key_of(work.total_weight),
        )
        shared = self._engines.pop(key, None)
        if shared is None:
            alike = (other for other in self._engines.values() if other.model == model)
            objective = next((other.objective for other in alike), task.objective)
            if objective is not task.objective:
                made = make(replace(work, task=replace(task, objective=objective)))
            if isinstance(made, Batched):
                made.capture, made.graphs = self._capture, self._graphs
            shared = _SharedEngine(made, objective, model, train)
            while len(self._engines) >= self._most:
                self._engines.pop(next(iter(self._engines)))
        self._engines[key] = shared
        if isinstance(shared.engine, Batched):
            shared.engine.begin_run()
        return shared.engine

    def prepared(self, engine: Engine, task: Task) -> Task:
        """Return the task with the objective that an engine was made for."""
        for shared in self._engines.values():
            if shared.engine is engine and shared.objective is not task.objective:
                return replace(task, objective=shared.objective)
        return task

    # CUDA graphs --------------------------------------------------------------------------------

    def evaluation(self, task: Task, precision: Precision) -> RepeatedProgram:
        """Return what evaluates a task: a CUDA graph, once it was captured in this or another run.

        It reads the examples where they are, with the weights of this partition.
        """
        if task.train not in self._sources:  # examples of the caller
            return RepeatedProgram()
        settings = (task.transform, task.counted, task.sums, task.test_offsets, precision)
        key = (
            Identity(task.objective),
            Identity(task.train),
            Identity(task.test),
            key_of(settings),
            _flags(),
        )
        program = self._evaluations.pop(key, None) or RepeatedProgram()
        while len(self._evaluations) >= MOST_EVALUATIONS:
            self._evaluations.pop(next(iter(self._evaluations)))
        self._evaluations[key] = program
        return program

    def _capture(self, program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        """Capture a program; where memory runs out, once more without the graphs of other runs."""
        self.captures += 1
        try:
            return self._capture_graph(program, inputs, warm_up)
        except torch.OutOfMemoryError:
            # the last one captures
            others = [shared.engine for shared in self._engines.values()][:-1]
            released = [engine.release() for engine in others if isinstance(engine, Batched)]
            if not any(released):
                raise
        torch.cuda.empty_cache()
        return self._capture_graph(program, inputs, warm_up)

    def _cuda_graph(self, program: Program, inputs: Tensors, warm_up: Program | None) -> Program:
        """Capture a CUDA graph; all share one pool of memory, since one is replayed at a time."""
        if not self._live:  # a pool ends with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        try:
            graph = capture_graph(program, inputs, warm_up, self._pool)
        except RuntimeError:  # the allocator may take the pool for one that is still recorded to
            self._live.clear()
            raise
        self._live.add(graph)
        return graph


@dataclass(frozen=True, eq=False)
class _SharedEngine:
    """An engine that runs share.

    Attributes:
        engine: the engine.
        objective: the objective that it was made for.
        model: key of the objective, and whether it is evaluated by stacked layers.
        train: the examples that the engine may hold results of, if any.
    """

    engine: Engine
    objective: Objective
    model: Hashable
    train: Federation | None


class _Source(NamedTuple):
    """The caller's tensors with the examples of a task; weak references, with versions.

    Attributes:
        references: to the fields of the training examples and of the test examples.
        versions: how often these were written to.
        offsets: of the clients.
        layout: what must be equal for other examples to overwrite a copy of these.
    """

    references: tuple[ReferenceType[Tensor], ...]
    versions: tuple[int, ...]
    offsets: Any
    layout: Hashable

    @classmethod
    def of(cls, task: Task) -> _Source:
        batches: list[Batch] = [task.train.fields, task.test or {}]
        tensors = [value for batch in batches for value in batch.values()]
        layout = tuple(tuple((n, v.shape, v.dtype) for n, v in b.items()) for b in batches)
        return cls(
            tuple(map(ref, tensors)), tuple(map(version, tensors)), task.train.offsets, layout
        )

    def tensors(self) -> list[Tensor]:
        """Return the fields, which the caller keeps until the end of the run."""
        tensors = [reference() for reference in self.references]
        assert all(value is not None for value in tensors), "the task of a run was dropped"
        return [value for value in tensors if value is not None]

    def is_same(self, other: _Source) -> bool:
        """Return whether these are the same tensors, not written to since, of the same clients."""
        pairs = zip(self.references, other.references, strict=True)
        return (
            all(a() is b() and a() is not None for a, b in pairs)
            and self.versions == other.versions
            and np.array_equal(self.offsets, other.offsets)
        )


@dataclass(eq=False)
class _Storage:
    """Examples on the device.

    Attributes:
        fields, test: the copies of training and test examples.
        loaded: what they are copies of at the moment.
    """

    fields: dict[str, Tensor]
    test: Batch | None
    loaded: _Source


def _copied(moved: Batch, original: Batch) -> dict[str, Tensor]:
    """Return the fields, with copies of those that were on the device: these are the caller's."""
    return {n: value.clone() if value is original[n] else value for n, value in moved.items()}


def _without_inputs(work: Work) -> Any:
    """Return local training without what is an input of a program: the step size of a round."""
    return replace(
        work.local, lr=1.0, lr_decay=1.0, decay_before_first_round=False, lr_schedule="constant"
    )


def _flags() -> tuple[bool, ...]:
    """Return the settings of torch that choose kernels."""
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


# Keys -------------------------------------------------------------------------------------------


def objective_key(objective: Objective) -> Hashable:
    """Return a key of the arithmetic of an objective; by identity where it cannot be compared."""
    if not isinstance(objective, ComparableObjective):
        return Identity(objective)
    constants = objective.constants()
    return key_of((type(objective), *constants.values), constants.inputs)
