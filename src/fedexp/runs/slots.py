"""Clients' states in the folder of a run: a file of slots that checkpoints refer to.

A checkpoint of a million states copies none of them. It waits until the slots are on the disk and
notes whose slot is whose; whoever writes checkpoints holds on to the states that the two on the
disk refer to, so their slots are not used again before they are replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedexp.client import Tensors
from fedexp.engine.slot_file import Layout, SlotFile
from fedexp.engine.state_store import Layer, StateStore, StoredStates
from fedexp.runs.atomic import PRIVATE
from fedexp.runs.manifest import SLOTS as SLOTS
from fedexp.runs.manifest import Slots
from fedexp.runs.records import DamagedError


def make_private(path: Path) -> None:
    """Make the file before anything is in it, or take it from others where it is there."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE))
    os.chmod(path, PRIVATE)


def stored_in(states: Mapping[int, Tensors], folder: Path) -> StoredStates | None:
    """The states, where they lie in the folder's file of slots."""
    if isinstance(states, StoredStates) and states.store.file.path == folder / SLOTS:
        return states
    return None


def opened(folder: Path, slots: Slots, device: torch.device) -> StateStore:
    """The store of a checkpoint, with all of its slots free until layers are held."""
    return StateStore(SlotFile(Layout(slots.layout), folder / slots.file, exists=True), device)


def restored(store: StateStore, layers: Iterable[Mapping[str, Tensor]]) -> StoredStates:
    """The states that layers in the order of a checkpoint refer to."""
    found = [_layer(named) for named in layers]
    if any(int(each.slots.max(initial=-1)) >= len(store.file) for each in found):
        raise DamagedError(f"{SLOTS} is shorter than it was")
    if not all(_is_sound(each) for each in found):
        raise DamagedError(f"a list of the slots in {SLOTS} is none")
    return StoredStates(store, tuple(store.hold(each) for each in found))


def layer_tensors(layer: Layer) -> dict[str, Tensor]:
    """A layer as tensors; checksums as signed numbers, which every reader knows."""
    checks = layer.checks.view(np.int32)
    columns = {"clients": layer.clients, "slots": layer.slots, "checks": checks}
    return {name: torch.from_numpy(value) for name, value in columns.items()}


def _is_sound(layer: Layer) -> bool:
    """Whether a layer has a slot and a checksum for each of its clients, who are in order."""
    columns = (layer.clients, layer.slots, layer.checks)
    whole = all(each.ndim == 1 and len(each) == len(layer) for each in columns)
    return whole and bool((np.diff(layer.clients) > 0).all() and (layer.slots >= 0).all())


def _layer(named: Mapping[str, Tensor]) -> Layer:
    clients, slots, checks = (named[name].cpu().numpy() for name in ("clients", "slots", "checks"))
    if [each.dtype.name for each in (clients, slots, checks)] != ["int64", "int64", "int32"]:
        raise DamagedError(f"a list of the slots in {SLOTS} is none")
    return Layer(clients, slots, checks.view(np.uint32))
