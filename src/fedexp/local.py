"""Local training: the settings of local optimisation, and one step of it, shared by all algorithms.

`local_step` is plain SGD. `optimizer_step` is every other optimiser that has a name: SGD with
momentum, Adam and AdamW, by the formulas of `torch.optim`, and Delta-SGD. Both work on parameters
[..., d], so that the loop, the threads and the batched engine take the same step. A function in the
style of `torch.optim` is called for one client at a time (`TorchOptimizer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fedexp.aggregate import norms
from fedexp.errors import UsageError, first_line, is_number, require, shown, whole_number
from fedexp.precision import widest

MakeOptimizer = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
Schedule = Literal["constant", "linear", "cosine"]
Optimizer = Literal["sgd", "adam", "adamw", "delta-sgd"]
Over = Literal["round", "run"]
KEPT = "optimizer."  # before the names of what `keep_state` adds to a client's state
OPTIONS_OF = {  # fields that other optimisers do not use
    "betas": ("adam", "adamw"),
    "adam_eps": ("adam", "adamw"),
    "delta_gamma": ("delta-sgd",),
    "delta_growth": ("delta-sgd",),
}
DEFAULT_STEPS = 20  # the paper's
OPTIONAL = ("steps", "epochs", "batch_size", "clip_norm")
NUMBERS = (
    *("adam_eps", "lr", "steps", "epochs", "batch_size", "weight_decay", "clip_norm", "lr_decay"),
    *("momentum", "delta_gamma", "delta_growth", "warmup_steps"),
)


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training. The paper's are 20 steps of SGD on batches of 50, decay 0.998,
    clip 10.

    The state of an optimiser (momentum, moments, number of steps) starts at zero in every round on
    every client, unless `keep_state`.
    The gradient is corrected by the client rule, then clipped; then weight decay is added.

    Args:
        lr: the client step size η_l > 0.
        steps: local steps τ; 20 where neither steps nor epochs are given.
        epochs: passes over the client's data, instead of a number of steps.
        batch_size: examples per batch; None trains on all of the client's data at once.
        weight_decay: λ >= 0; λ w is added to the gradient after clipping, as in torch
            (docs/paper.md#released-clipping). "adamw" decouples it: w shrinks by 1 - η_l λ.
        clip_norm: bound on the norm of the corrected gradient, over the whole vector.
        lr_decay: factor on lr after every round.
        decay_before_first_round: decay before the first round as well
            (docs/paper.md#released-decay-timing).
        optimizer: "sgd", "adam", "adamw", "delta-sgd", or a function in the style of `torch.optim`,
            e.g. `lambda params, lr: torch.optim.RMSprop(params, lr)`, called for every client and
            round with one vector of all parameters. A function runs in the loop and in threads
            only.
        momentum: of "sgd", in [0, 1).
        nesterov: Nesterov's momentum.
        betas: decay of the two moments of "adam" and "adamw".
        adam_eps: added to the root of their second moment.
        keep_state: a client continues with the momentum, or the moments and the number of steps,
            of its last round. They are client state, stored and checkpointed; a client whose
            update is not finite keeps those from before. Of sgd with momentum, adam and adamw.
        lr_schedule: factor on lr in round t of T: "constant"; "linear", 1 - (t-1)/T; "cosine",
            (1 + cos(π (t-1)/T)) / 2; or a function of the round. `lr_decay` multiplies it.
        step_schedule: the same over the local steps, from step 0: a function has the arguments
            (step, steps).
        step_schedule_over: the steps that are counted: those of a "round", or of the "run". Step s
            of the S steps of a client's round is step (t-1) S + s of T S, whether or not it took
            part in the rounds before.
        warmup_steps: W, the number of steps, counted likewise, over which the step size grows
            linearly from 1/W of its value; the schedule begins after them.
        delta_gamma: γ of "delta-sgd", the factor on the inverse of the local smoothness.
        delta_growth: δ of "delta-sgd", which limits how fast its step size grows.
    """

    lr: float = 0.01
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = 50
    weight_decay: float = 0.0
    clip_norm: float | None = None
    lr_decay: float = 1.0
    decay_before_first_round: bool = False
    optimizer: Optimizer | MakeOptimizer = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    keep_state: bool = False
    lr_schedule: Schedule | Callable[[int], float] = "constant"
    step_schedule: Schedule | Callable[[int, int], float] = "constant"
    step_schedule_over: Over = "round"
    warmup_steps: int = 0
    delta_gamma: float = 2.0
    delta_growth: float = 0.1

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            valid = isinstance(value, Real) or (value is None and name in OPTIONAL)
            require(valid, f"local.{name} must be a number, not {value!r}")
        require(is_number(self.lr) and self.lr > 0, f"local.lr must be > 0, not {self.lr}")
        require(
            self.steps is None or self.epochs is None,
            f"local.steps={self.steps} and local.epochs={self.epochs} exclude each other; leave "
            "one out, or set it to None",
        )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)
        for name in ("steps", "epochs", "batch_size"):
            if getattr(self, name) is not None:
                whole_number(f"local.{name}", getattr(self, name), 1)
        whole_number("local.warmup_steps", self.warmup_steps, 0)
        keeps = self.keep_state
        require(isinstance(keeps, bool), f"local.keep_state is true or false, not {keeps!r}")
        decay = self.weight_decay
        require(is_number(decay) and decay >= 0, f"local.weight_decay must be >= 0, not {decay}")
        clip = self.clip_norm
        require(clip is None or clip > 0, f"local.clip_norm must be positive, not {clip}")
        require(0 < self.lr_decay <= 1, f"local.lr_decay must be in (0, 1], not {self.lr_decay}")
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        optimizer, momentum = self.optimizer, self.momentum
        require(
            callable(optimizer) or optimizer in get_args(Optimizer),
            "local.optimizer is sgd, adam, adamw, delta-sgd or a function, e.g. lambda params, lr: "
            f"torch.optim.RMSprop(params, lr), not {shown(repr(optimizer), 40)}",
        )
        require(0 <= momentum < 1, f"local.momentum must be in [0, 1), not {momentum}")
        require(
            not momentum or optimizer == "sgd",
            "local.momentum belongs to sgd; set local.betas of adam, or the momentum in your "
            "function",
        )
        require(not self.nesterov or momentum > 0, "local.nesterov needs local.momentum > 0")
        two = isinstance(self.betas, Sequence) and len(self.betas) == 2
        good = two and all(isinstance(beta, Real) and 0 <= beta < 1 for beta in self.betas)
        require(good, f"local.betas must be two numbers in [0, 1), not {self.betas}")
        require(self.adam_eps >= 0, f"local.adam_eps must be >= 0, not {self.adam_eps}")
        require(
            not self.keep_state or momentum > 0 or optimizer in ("adam", "adamw"),
            "local.keep_state keeps the momentum of sgd or the moments of adam and adamw; set "
            "local.momentum or local.optimizer, or leave it out",
        )
        check_schedule("local.lr_schedule", self.lr_schedule)
        check_schedule("local.step_schedule", self.step_schedule)
        over = self.step_schedule_over
        require(
            over == "round" or (over == "run" and self.has_step_schedule),
            "local.step_schedule_over is round, or run with local.step_schedule or "
            f"local.warmup_steps, not {over!r}",
        )
        require(
            not (callable(self.step_schedule) and self.warmup_steps),
            "local.warmup_steps belongs to a named schedule; let your local.step_schedule warm up",
        )
        for name in ("delta_gamma", "delta_growth"):
            value = getattr(self, name)
            require(
                math.isfinite(value) and value > 0,
                f"local.{name} must be positive and finite, not {value}",
            )
        require(
            optimizer != "delta-sgd" or not self.has_step_schedule,
            "delta-sgd chooses the step size of every local step; leave local.step_schedule out, "
            "and local.warmup_steps",
        )
        for name, owners in OPTIONS_OF.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            same = (tuple(value) if isinstance(value, list) else value) == default
            require(
                optimizer in owners or same,
                f"local.{name} belongs to {' and '.join(owners)}; set local.optimizer, or leave it "
                "out",
            )

    @property
    def is_sgd(self) -> bool:
        """Whether a step is w - η g: then Δ is a sum of gradients times step sizes."""
        return self.optimizer == "sgd" and not self.momentum

    @property
    def is_plain_sgd(self) -> bool:
        """Whether all steps are SGD without momentum, with one step size."""
        return self.is_sgd and not self.has_step_schedule

    @property
    def has_step_schedule(self) -> bool:
        """Whether the step size changes from step to step."""
        return self.step_schedule != "constant" or self.warmup_steps > 0

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """Return η_l in a round; rounds are counted from 1, `rounds` is their number.

        >>> LocalTraining(lr=1.0, lr_decay=0.5).lr_at(2)
        0.5
        >>> LocalTraining(lr=1.0, lr_schedule="linear").lr_at(3, rounds=4)
        0.5
        """
        lr = self.lr * self.lr_decay ** (round - 1 + self.decay_before_first_round)
        return lr * round_factor(self.lr_schedule, "local.lr_schedule", round, rounds)

    def step_factors(self, steps: int, round: int = 1, rounds: int | None = None) -> list[float]:
        """Return the factor on η_l in each of a client's steps of a round.

        >>> LocalTraining(step_schedule="linear").step_factors(4)
        [1.0, 0.75, 0.5, 0.25]
        >>> local = LocalTraining(step_schedule="linear", step_schedule_over="run", warmup_steps=2)
        >>> [local.step_factors(3, round, rounds=2) for round in (1, 2)]
        [[0.5, 1.0, 1.0], [0.75, 0.5, 0.25]]
        """
        first, total = 0, steps
        if self.step_schedule_over == "run":
            first = (round - 1) * steps
            require(
                rounds is not None or self.step_schedule == "constant",
                "local.step_schedule_over='run' needs the number of rounds, which is not known "
                "here; use 'round'",
            )
            total *= rounds or 1
        return [self._step_factor(s, total) for s in range(first, first + steps)]

    def _step_factor(self, step: int, steps: int) -> float:
        """Return the factor on η_l in one of so many steps."""
        schedule, warmup = self.step_schedule, self.warmup_steps
        if callable(schedule):
            example = "lambda step, steps: 1 - step / steps"
            factor = _called(schedule, "local.step_schedule", example, step, steps)
            return _checked(factor, f"local.step_schedule({step}, {steps})")
        if step < warmup:
            return (step + 1) / warmup
        return _factor(schedule, step - warmup, steps - warmup)

    def steps_for(self, size: int) -> int:
        """Return the number of local steps of a client with `size` examples."""
        if self.epochs is None:
            assert self.steps is not None
            return self.steps
        return self.epochs * math.ceil(size / (self.batch_size or size))


def check_schedule(name: str, schedule: Any) -> None:
    """Refuse what is neither the name of a schedule nor a function."""
    names = get_args(Schedule)
    valid = callable(schedule) or schedule in names
    require(valid, f"{name} is {', '.join(names)} or a function, not {schedule!r}")


def round_factor(
    schedule: Schedule | Callable[[int], float], name: str, round: int, rounds: int | None
) -> float:
    """Return the factor of a schedule in a round, counted from 1; `name` is that of its option."""
    if callable(schedule):
        factor = _called(schedule, name, "lambda round: 0.9**round", round)
        return _checked(factor, f"{name}({round})")
    require(
        rounds is not None or schedule == "constant",
        f"{name} {schedule!r} needs the number of rounds, which is not known here; pass a function "
        "of the round",
    )
    return _factor(schedule, round - 1, rounds or 1)


def _factor(schedule: str, done: int, total: int) -> float:
    """Return the factor of a schedule after `done` of `total` rounds or steps."""
    if schedule == "constant":
        return 1.0
    part = min(done / total, 1.0)
    return 1 - part if schedule == "linear" else (1 + math.cos(math.pi * part)) / 2


def _called(function: Callable[..., Any], name: str, example: str, *arguments: Any) -> Any:
    """Return what a user's function returns; refuse one that takes other arguments."""
    try:
        return function(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{name} does not take its arguments ({first_line(error)}); e.g. {example}"
        ) from error


def _checked(factor: Any, what: str) -> float:
    number = isinstance(factor, Real) or (isinstance(factor, Tensor) and factor.numel() == 1)
    require(number, f"{what} must be a number, not {shown(repr(factor), 40)}")
    value = float(factor)
    require(math.isfinite(value) and value > 0, f"{what} must be positive, not {value}")
    return value


def local_step(
    params: Tensor, grad: Tensor, lr: float | Tensor, local: LocalTraining, in_place: bool = False
) -> Tensor:
    """Take one step of local SGD on parameters [..., d]: clip, add weight decay, descend.

    w - η (c g + λ w) with the clipping factor c, computed as (1 - η λ) w - (η c) g: fewer passes
    over the memory of a large model, and fewer still where `params` may be overwritten.
    """
    rate = torch.as_tensor(lr, dtype=widest(grad.device))
    if local.clip_norm is not None:
        rate = rate * clip_factor(grad, local.clip_norm)
    return _descend(params, grad, lr, rate.to(grad), local, in_place)


def local_step_in_parts(
    params: Sequence[Tensor], grads: Sequence[Tensor], lr: float, local: LocalTraining
) -> None:
    """Take `local_step` in place on the consecutive parts of one vector, with the same bits.

    On a CPU, joining the gradients of a large model in one vector takes longer than the step.
    """
    rate = torch.as_tensor(lr, dtype=widest(grads[0].device))
    if local.clip_norm is not None:
        lengths = torch.stack([torch.linalg.vector_norm(grad) for grad in grads])
        if not _surely_within(lengths[None], local.clip_norm):
            rate = rate * clip_factor(torch.cat(list(grads)), local.clip_norm)
    rate = rate.to(grads[0])
    for part, grad in zip(params, grads, strict=True):
        _descend(part, grad, lr, rate, local, in_place=True)


def _descend(
    params: Tensor,
    grad: Tensor,
    lr: float | Tensor,
    rate: Tensor,
    local: LocalTraining,
    in_place: bool,
) -> Tensor:
    """Return (1 - η λ) w - (η c) g, where `rate` is η c."""
    if not local.weight_decay:
        out = params if in_place else None
        return torch.addcmul(params, grad, rate, value=-1, out=out)
    shrink = 1 - lr * local.weight_decay
    # in place, because another temporary of that size would take longer than the arithmetic
    shrunk = params.mul_(shrink) if in_place else params * shrink
    return shrunk.addcmul_(grad, rate, value=-1)


def init_moments(params: Tensor, local: LocalTraining) -> dict[str, Tensor]:
    """Return the optimiser's state before a client's first step: zeros like its parameters."""
    if local.is_sgd or callable(local.optimizer):  # a function's optimiser has its own state
        return {}
    if local.optimizer == "delta-sgd":
        number = params.new_zeros(*params.shape[:-1], 1, dtype=widest(params.device))
        return {"grad": torch.zeros_like(params), "rate": number, "ratio": number}
    names = ("momentum",) if local.optimizer == "sgd" else ("first", "second")
    return {name: torch.zeros_like(params) for name in names}


def kept_state(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an optimiser's state, with `steps`, by the names that it has in a client's state."""
    return {KEPT + name: value for name, value in moments.items()}


def init_kept_state(params: Tensor, local: LocalTraining) -> dict[str, Tensor]:
    """Return what `keep_state` adds to a client's state, before its first round.

    >>> sorted(init_kept_state(torch.zeros(3), LocalTraining(momentum=0.9, keep_state=True)))
    ['optimizer.momentum', 'optimizer.steps']
    """
    if not local.keep_state:
        return {}
    steps = torch.zeros(1, dtype=torch.int64, device=params.device)
    return kept_state({**init_moments(params, local), "steps": steps})


def split_client_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the client rule's part of a client's state, and the kept state of its optimiser."""
    kept = {n.removeprefix(KEPT): value for n, value in state.items() if n.startswith(KEPT)}
    return {n: value for n, value in state.items() if not n.startswith(KEPT)}, kept


def optimizer_step(
    params: Tensor,
    grad: Tensor,
    moments: Mapping[str, Tensor],
    step: int | Tensor,
    lr: float | Tensor,
    local: LocalTraining,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take one step of the optimiser on parameters [..., d]; return them and its state.

    With the clipped gradient g, plus λ w except for AdamW:

        SGD     m ← μ m + g;  w ← w - η m, or w - η (g + μ m) by Nesterov
        Adam    m ← β₁ m + (1-β₁) g;  v ← β₂ v + (1-β₂) g²;
                w ← w - η / (1-β₁ᵗ) · m / (√v / √(1-β₂ᵗ) + eps)
        AdamW   w ← (1 - η λ) w first, then as Adam
        Delta-SGD   w ← w - ηₖ gₖ, see `delta_step_size`

    Args:
        params: w.
        grad: the gradient, corrected by the client rule.
        moments: the state, zero before the first step.
        step: t, from 1.
        lr: η of this step, a number or a tensor that broadcasts to [..., 1].
        local: the settings.
    """
    grad = clipped(grad, local)
    if local.optimizer == "adamw":
        params = params * (1 - _like(lr, params) * local.weight_decay)
    elif local.weight_decay:
        grad = grad.add(params, alpha=local.weight_decay)
    if local.is_sgd:
        return params - _like(lr, params) * grad, {}
    if local.optimizer == "sgd":
        momentum = grad.add(moments["momentum"], alpha=local.momentum)
        ahead = grad.add(momentum, alpha=local.momentum) if local.nesterov else momentum
        return params - _like(lr, params) * ahead, {"momentum": momentum}
    if local.optimizer == "delta-sgd":
        eta, theta = delta_step_size(grad, moments, lr, local)
        after = torch.addcmul(params, grad, eta.to(grad), value=-1)
        return after, {"grad": grad.clone(), "rate": eta, "ratio": theta}
    beta1, beta2 = local.betas
    first = moments["first"].lerp(grad, 1 - beta1)
    second = (moments["second"] * beta2).addcmul_(grad, grad, value=1 - beta2)
    rate, root = lr / (1 - beta1**step), (1 - beta2**step) ** 0.5
    scale = (second.sqrt() / _like(root, params)).add_(local.adam_eps)
    return params - _like(rate, params) * (first / scale), {"first": first, "second": second}


def delta_step_size(
    grad: Tensor, moments: Mapping[str, Tensor], lr: float | Tensor, local: LocalTraining
) -> tuple[Tensor, Tensor]:
    """Return the step sizes ηₖ of Delta-SGD (Kim et al., 2024) and θₖ = ηₖ / ηₖ₋₁, [..., 1] each.

        ηₖ = min(γ ||xₖ - xₖ₋₁|| / (2 ||gₖ - gₖ₋₁||), √(1 + δ θₖ₋₁) ηₖ₋₁)

    Norms are over all parameters of a client; xₖ - xₖ₋₁ is -ηₖ₋₁ gₖ₋₁. In every round η₀ is `lr`
    and θ₀ = 1; γ and δ are `delta_gamma` and `delta_growth`. Where one of the two differences is
    zero the second bound alone counts. gₖ and gₖ₋₁ are the gradients of the steps, each of its own
    batch. The released code has η₀ = 0.2, γ = 2 and δ = 0.02, computes both gradients on the batch
    of step k, at the price of a second one, and takes a first step of √(1 + δ) η₀. The text of the
    paper has not been compared.

    >>> local = LocalTraining(optimizer="delta-sgd")
    >>> before = init_moments(torch.zeros(2), local)
    >>> delta_step_size(torch.tensor([3.0, 4.0]), before, 0.2, local)[0].item()
    0.2
    """
    before, rate = moments["grad"], moments["rate"]
    grown = rate * (1 + local.delta_growth * moments["ratio"]).sqrt()
    moved, change = rate * _lengths(before), _lengths(grad - before)
    defined = (moved > 0) & (change > 0)
    smooth = 0.5 * local.delta_gamma * moved / change.masked_fill(~defined, 1.0)
    eta = torch.where(defined, torch.minimum(smooth, grown), grown)
    first = rate == 0
    return torch.where(first, lr, eta), torch.where(first, 1.0, eta / rate)


def _lengths(vectors: Tensor) -> Tensor:
    """Return the norms of vectors [..., d], shape [..., 1]."""
    rows = vectors.reshape(-1, vectors.shape[-1])
    return norms(rows).view(*vectors.shape[:-1], 1)


def _like(value: float | Tensor, params: Tensor) -> float | Tensor:
    """Return a number, or a tensor in the type of the parameters."""
    return value.to(params.dtype) if isinstance(value, Tensor) else value


class TorchOptimizer:
    """One client's optimiser, made by a function in the style of `torch.optim`.

    Args:
        make: the function; it has the parameters [one vector] and the step size of the round.
        params: the vector, which the steps overwrite.
        lr: the step size.
    """

    def __init__(self, make: MakeOptimizer, params: Tensor, lr: float) -> None:
        self.vector = nn.Parameter(params)  # shares the memory of `params`
        example = "lambda params, lr: torch.optim.RMSprop(params, lr)"
        self.optimizer = _called(make, "local.optimizer", example, [self.vector], lr)
        require(
            isinstance(self.optimizer, torch.optim.Optimizer),
            "local.optimizer must return a torch.optim.Optimizer, e.g. lambda params, lr: "
            "torch.optim.RMSprop(params, lr)",
        )
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, params: Tensor, grad: Tensor, factor: float, local: LocalTraining) -> None:
        """Take one step, with the optimiser's own step sizes times `factor`; writes `params`."""
        grad = clipped(grad, local)
        self.vector.grad = grad.add(params, alpha=local.weight_decay)  # a copy
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()


def clipped(grad: Tensor, local: LocalTraining) -> Tensor:
    """Return gradients [..., d] whose norms are at most `clip_norm`, if there is a bound."""
    if local.clip_norm is None:
        return grad
    return grad * clip_factor(grad, local.clip_norm).to(grad)


def clip_factor(grad: Tensor, bound: float) -> Tensor:
    """Return the clipping factors min(1, bound / norm) of vectors [..., d], shape [..., 1].

    >>> clip_factor(torch.tensor([3.0, 4.0]), 1.0).tolist()
    [0.2...]
    """
    rows = grad.reshape(-1, grad.shape[-1])
    if _surely_within(rows, bound):
        return torch.ones(*grad.shape[:-1], 1, dtype=widest(grad.device))
    # in float64, because the square of a large float32 overflows and the factor would be 0
    return clip_to(_lengths(grad), bound)


def _surely_within(rows: Tensor, bound: float) -> bool:
    """Return whether a cheap estimate shows that no norm reaches the bound; on a CPU only.

    It takes a tenth of the time of exact norms. The error of float32 sums is far below a factor of
    two, and a sum that overflows is not within the bound.
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return False
    return bool((torch.linalg.vector_norm(rows, dim=1) < bound / 2).all())


def clip_to(norm: Tensor, bound: float) -> Tensor:
    """Return the factors that scale vectors of these norms to at most `bound`."""
    return (bound / norm).clamp(max=1.0)
