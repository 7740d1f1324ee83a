"""A client rule at work inside somebody else's training loop, parameter by parameter.

Client rules are elementwise, so correcting each parameter's gradient with its own piece of the flat
vectors is the same as correcting the whole: the mathematics stays in `fedexp.client`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedexp.client import Tensors
from fedexp.errors import require
from fedexp.flower.request import Request


@dataclass(eq=False)
class Piece:
    """One parameter of the model, and where it lies in the flat vectors.

    Attributes:
        places: a slice for each of its names; tied weights have several.
        travel: the sum of the learning rates of its steps so far.
        drawn: the sum of learning rate times corrected gradient, where it is needed.
        corrected: whether its gradient has been corrected since the last step.
    """

    name: str
    param: nn.Parameter
    places: list[slice]
    start: Tensor
    shared: Tensors
    mine: Tensors
    travel: float = 0.0
    drawn: Tensor | None = None
    corrected: bool = False


class Corrections:
    """The gradient corrections of one client in one round.

    Args:
        request: what the server asks for.
        model: the model, already loaded with what the server sent.
        sums_gradients: whether `finish` takes the gradients that the optimiser saw instead of how
            far the model went; right for any optimiser, while the way is that of plain SGD only.
    """

    def __init__(self, request: Request, model: nn.Module, sums_gradients: bool) -> None:
        self.request = request
        self.sums_gradients = sums_gradients and bool(request.mine)
        self.pieces: dict[int, Piece] = {}
        slices = _slices(request)
        for name, param in model.named_parameters(remove_duplicate=False):
            if name not in slices:
                continue
            if id(param) in self.pieces:
                self.pieces[id(param)].places.append(slices[name])
            elif param.requires_grad:
                self.pieces[id(param)] = self._piece(name, param, slices[name])

    def _piece(self, name: str, param: nn.Parameter, place: slice) -> Piece:
        request = self.request
        sent = request.start[place].view(param.shape)
        require(
            torch.equal(param.detach().cpu(), sent.to(param.dtype)),
            f"{name!r} is not what the server sent; make LocalRule after model.load_state_dict",
        )
        shared, mine = (
            {k: v[place].view(param.shape).to(param.device) for k, v in vectors.items()}
            for vectors in (request.shared, request.mine)
        )
        return Piece(name, param, [place], param.detach().clone(), shared, mine)

    @torch.no_grad()
    def correct(self, pieces: Iterable[Piece]) -> None:
        """Correct the gradients in place. One that is not there is zero, as in the simulator."""
        rule = self.request.rule
        for piece in pieces:
            param = piece.param
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            require(
                not param.grad.is_sparse,
                f"{piece.name!r} has sparse gradients, which cannot be corrected; build the layer "
                "with sparse=False",
            )
            param.grad.copy_(
                rule.correct(param.grad, param.detach(), piece.start, piece.shared, piece.mine)
            )
            piece.corrected = True

    @torch.no_grad()
    def count(self, piece: Piece, lr: float) -> None:
        """Note a step of a parameter along its corrected gradient."""
        piece.travel += lr
        piece.corrected = False
        if self.sums_gradients and piece.param.grad is not None:
            grad = piece.param.grad
            if piece.drawn is None:
                wide = torch.promote_types(grad.dtype, torch.float32)
                piece.drawn = torch.zeros_like(grad, dtype=wide)
            piece.drawn.add_(grad, alpha=lr)

    def finish(self, delta: Tensor) -> tuple[Tensors, Tensors]:
        """What the client keeps and what it adds to the sums, after an update Δ_i.

        A number that never moved (a frozen parameter, or no step at all) keeps the state it had
        and adds nothing: nothing was learned about it.
        """
        request, travel = self.request, torch.zeros_like(delta)
        for piece in self.pieces.values():
            for place in piece.places:
                self._check(piece, delta[place])
                travel[place] = piece.travel
        if self.sums_gradients:
            delta = self._drawn(delta)
        moved = travel > 0
        kept, extras = request.rule.finish(
            delta, torch.where(moved, travel, 1.0), request.shared, request.mine
        )
        kept = {name: torch.where(moved, v, request.mine[name]) for name, v in kept.items()}
        return kept, {name: torch.where(moved, v, 0.0) for name, v in extras.items()}

    def _drawn(self, delta: Tensor) -> Tensor:
        """How far plain SGD would have gone with the same gradients: sum of η ĝ."""
        drawn = torch.zeros_like(delta)
        for piece in self.pieces.values():
            if piece.drawn is not None:
                for place in piece.places:
                    drawn[place] = piece.drawn.flatten().to(drawn)
        return drawn

    def _check(self, piece: Piece, delta: Tensor) -> None:
        require(
            piece.travel > 0 or not bool(delta.any()),
            f"{piece.name!r} was trained without its gradients being corrected; give LocalRule "
            "every optimiser of the loop, or call took_step(lr) in a loop without one",
        )


def _slices(request: Request) -> dict[str, slice]:
    """Where each parameter lies in the flat vectors."""
    places, at = {}, 0
    for slot in request.layout.slots:
        if slot.kind == "parameter":
            places[slot.name] = slice(at, at + slot.size)
            at += slot.size
    return places
