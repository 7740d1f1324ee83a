"""What clients keep between rounds, in a mapping whose successor shares what did not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedexp.client import Tensors

Shapes = frozenset[tuple[str, tuple[int, ...]]]


def shapes_of(state: Tensors) -> Shapes:
    """Names and shapes of tensors."""
    return frozenset((name, tuple(value.shape)) for name, value in state.items())


class ClientStates(Mapping[int, Tensors]):
    """The states of the clients that have taken part.

    A round changes few of very many, so a copy of all would be what costs most in it. These are
    layers, newest first, each more than twice as large as the one before: adding a round costs
    what changed, times the logarithm of what is there, on average.

    >>> old = ClientStates.of({1: {}, 2: {}})
    >>> new = old.updated({2: {}, 3: {}})
    >>> sorted(old), sorted(new)
    ([1, 2], [1, 2, 3])
    """

    def __init__(self, layers: tuple[dict[int, Tensors], ...] = ()) -> None:
        self._layers = layers

    @staticmethod
    def of(states: Mapping[int, Tensors]) -> ClientStates:
        """The states as they are, where they are of this kind; else in memory."""
        if isinstance(states, ClientStates):
            return states
        return ClientStates((dict(states),) if states else ())

    def updated(self, changed: Mapping[int, Tensors]) -> ClientStates:
        """These with some changed or added; this one stays as it is."""
        if not changed:
            return self
        newest, *older = dict(changed), *self._layers
        while older and 2 * len(newest) >= len(older[0]):
            newest = {**older.pop(0), **newest}
        return ClientStates((newest, *older))

    def stacked(self, clients: Sequence[int], fresh: Tensors) -> dict[str, Tensor]:
        """What some clients keep, side by side [K, ...]; `fresh` for those that keep nothing yet.

        >>> states = ClientStates.of({2: {"control": torch.ones(1)}})
        >>> states.stacked([1, 2], {"control": torch.zeros(1)})["control"].tolist()
        [[0.0], [1.0]]
        """
        rows = [self.get(client, fresh) for client in clients]
        return {name: torch.stack([row[name] for row in rows]) for name in fresh}

    def shapes(self) -> set[Shapes]:
        """Names and shapes of what clients keep: one entry where all keep the same."""
        return {shapes_of(state) for layer in self._layers for state in layer.values()}

    def changed_since(self, before: Mapping[int, Tensors]) -> set[int]:
        """The clients whose states are others than in an earlier one.

        Layers that both have are not looked at.
        """
        known = before._layers if isinstance(before, ClientStates) else ()
        fresh = [layer for layer in self._layers if not any(layer is old for old in known)]
        return {c for layer in fresh for c in layer if before.get(c) is not self[c]}

    def __getitem__(self, client: int) -> Tensors:
        for layer in self._layers:
            if client in layer:
                return layer[client]
        raise KeyError(client)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(set().union(*self._layers)))

    def __len__(self) -> int:
        return len(set().union(*self._layers))
