"""`OuterOptimizer`: a server rule as a `torch.optim.Optimizer`, for workers that train apart."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from fedexp.aggregate import SCALARS, Aggregate, norms
from fedexp.errors import FedExPError, NonFiniteUpdateWarning, is_number, require
from fedexp.server import ServerRule, State
from fedexp.server.base import scalar

Number = Tensor | float
GROUP_OPTIONS = {"params", "param_names", "lr", "initial_lr"}
AVERAGE = "average"  # the name of the output model in the state; all others are the rule's


class OuterOptimizer(torch.optim.Optimizer):
    """A server rule as the outer optimizer of DiLoCo and local SGD.

    Every worker takes some steps with its own, inner optimizer. Then `.grad` of every parameter is
    to hold the pseudo-gradient, the mean over workers of Δ_i = w - w_i: the weights at the last
    synchronisation minus those of worker i (eq. 3). `step` applies the rule to one vector over all
    parameter groups, and does not communicate. A round::

        start = [p.detach().clone() for p in model.parameters()]
        ...                                 # inner steps
        outer.set_pseudo_gradients(start)   # .grad is w - w_i, the parameters are w again
        outer.all_reduce()                  # .grad and squared norms are means over workers
        outer.step()

    Rules that read the workers' squared norms (FedExP) get them from `all_reduce` or `set_sums`, or
    in torchft from `fedexp.outer.torchft.OuterManager`.

    The vector is in float32, or float64 where a parameter is, on the device of the first parameter;
    results are rounded to each parameter's type. Frozen parameters are not part of it and keep
    their state. Buffers of the model are not averaged. `state_dict` has the rule's state by
    parameter and the `lr` of the groups; the rule itself is an argument.

    Args:
        params: parameters or groups of them; the only option of a group is `lr`.
        rule: the server rule, e.g. `fedexp.ExP()`.
        lr: factor on the step of the rule, w + lr (rule(w) - w), which torch's schedulers change.
            The metric `server_lr` is the rule's step size, without it.

    Attributes:
        rule: the server rule.
        sums: what `set_sums` set for the next step; empty before, and after the step.
        metrics: of the last step, what the rule reports (`server_lr`, `diversity`, `clamped`, ...);
            `count` and `dropped`, the workers in the mean and left out, where they are known.

    >>> import fedexp as fx
    >>> w = nn.Parameter(torch.zeros(2))
    >>> outer = OuterOptimizer([w], fx.ExP(eps=0.0))
    >>> w.grad = torch.tensor([0.5, 0.0])  # the mean of [2, 1] and [-1, -1]
    >>> outer.set_sums(sq_norm=(5 + 2) / 2, count=2)
    >>> outer.step()
    >>> outer.metrics["server_lr"], w.tolist()
    (7.0, [-3.5, 0.0])
    """

    def __init__(self, params: ParamsT, rule: ServerRule, lr: float = 1.0) -> None:
        require(
            isinstance(rule, ServerRule),
            f"rule must be a server rule such as fedexp.ExP(), not {type(rule).__name__}; that of "
            "an algorithm is its attribute server",
        )
        require(
            rule.average_last <= 2,
            f"the output model is the mean of 1 or 2 iterates here, not of {rule.average_last}",
        )
        require(is_number(lr) and lr >= 0, f"lr must be a number of at least 0, not {lr!r}")
        self.rule = rule
        self.metrics: dict[str, float] = {}
        self.sums: dict[str, Number] = {}
        super().__init__(params, {"lr": lr})

    def __getstate__(self) -> dict[str, Any]:
        # without sums, as torch's copies of parameters have no .grad
        return {**super().__getstate__(), "rule": self.rule, "metrics": self.metrics, "sums": {}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with the state of a first step; what the whole model shares stays."""
        unknown = ", ".join(sorted(param_group.keys() - GROUP_OPTIONS))
        require(not unknown, f"the only option of a parameter group is lr here, not {unknown}")
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            require(
                type(param) in (Tensor, nn.Parameter) and param.is_floating_point(),
                "OuterOptimizer takes whole parameters of floating-point numbers, not "
                f"{type(param).__name__} of {param.dtype}: one process does not have the squared "
                "norm of sharded parameters",
            )

    @torch.no_grad()
    def set_pseudo_gradients(self, start: Iterable[Tensor]) -> None:
        """Set `.grad` to `start` minus the parameters, and the parameters to `start`.

        Args:
            start: the parameters at the last synchronisation, in the order of the groups.
        """
        params, start = self._params(), list(start)
        require(
            [param.shape for param in params] == [weights.shape for weights in start],
            f"start must have the shapes of the {len(params)} parameters, in their order",
        )
        require(
            all(p.data_ptr() != w.data_ptr() for p, w in zip(params, start, strict=True)),
            "start shares its memory with the parameters, so that it changed with them: use "
            "p.detach().clone()",
        )
        for param, weights in zip(params, start, strict=True):
            param.grad = weights.to(param) - param
            param.copy_(weights)

    @torch.no_grad()
    def local_sq_norm(self) -> Tensor:
        """Return ||Δ_i||² of this worker's `.grad` before it is averaged, a float64 scalar."""
        return norms(self._gradient(self._trained())[None])[0].square()

    def set_sums(
        self, *, sq_norm: Number, count: Number, weight: Number = 1.0, dropped: Number = 0.0
    ) -> None:
        """Set what the next step needs besides `.grad`, equal on all workers.

        Args:
            sq_norm: mean over workers of `local_sq_norm`.
            count: number of workers.
            weight: 1 if `.grad` and `sq_norm` are means. If they are sums p_i Δ_i and
                p_i ||Δ_i||² over workers, the sum of p_i.
            dropped: number of workers left out.
        """
        self.sums = {"weight": weight, "sq_norm": sq_norm, "count": count, "dropped": dropped}

    @torch.no_grad()
    def all_reduce(self, group: Any = None) -> None:
        """Replace `.grad` by its mean over workers, and set the sums, in one all-reduce.

        Four numbers are sent besides the vector, in its type. A worker whose update is not finite
        is left out, with a `NonFiniteUpdateWarning` on all workers.

        Args:
            group: process group of `torch.distributed`, one process per worker; None for all.
        """
        params = self._trained()
        local = Aggregate.of(self._gradient(params)[None])
        buffer = local.pack().to(local.update.dtype)
        torch.distributed.all_reduce(buffer, group=group)
        sums = local.unpack(buffer)
        for param, mean in zip(params, _split(sums.mean, params), strict=True):
            param.grad = mean.to(param)
        weight, dropped = sums.weight.clamp(max=1.0), sums.dropped  # 0 if all were left out
        self.set_sums(sq_norm=sums.mean_sq_norm, count=sums.count, weight=weight, dropped=dropped)
        if dropped > 0:
            text = f"{dropped:.0f} workers are left out: their pseudo-gradient is not finite"
            warnings.warn(text, NonFiniteUpdateWarning, stacklevel=3)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the rule to the mean pseudo-gradient in `.grad`.

        Raises:
            FedExPError: weights, or a squared norm that the rule reads, would not be finite. The
                step has not been taken.
        """
        name = type(self.rule).__name__
        require(closure is None, "an outer step takes no closure: .grad is the pseudo-gradient")
        params = self._trained()
        update, before = self._gradient(params), _vector(params)
        sums, self.sums = self.sums, {}
        # of no update the norm is 0: torch's distributed checkpoints take such a step
        missing = torch.nan if update.any() else 0.0
        require(
            bool(sums) or not (self.rule.reads_norms and missing),
            f"{name} reads the workers' squared norms, and none were set since its last step; use "
            "outer.all_reduce(), or outer.set_sums() with the mean of outer.local_sq_norm(), or "
            "fedexp.outer.torchft.OuterManager with torchft",
        )
        numbers = {"weight": 1.0, "sq_norm": missing, "count": missing, "dropped": missing, **sums}
        weight, sq_norm, count, dropped = (scalar(float(numbers[key]), before) for key in SCALARS)
        aggregate = Aggregate(weight, update, sq_norm, count, dropped)
        after, state, metrics = self.rule.step(before, aggregate, self._rule_state(params, before))
        groups = [group for group in self.param_groups for _ in group["params"]]
        lrs = [g["lr"] for g, p in zip(groups, self._params(), strict=True) if p.requires_grad]
        olds, news = _split(before, params), _split(after, params)
        iterates = [
            old.lerp(new, float(lr)).to(param)
            for old, new, lr, param in zip(olds, news, lrs, params, strict=True)
        ]
        read = [update, *iterates, *(v for v in state.values() if v.shape == before.shape)]
        read += [sq_norm] if self.rule.reads_norms else []
        if not (weight > 0 and all(value.isfinite().all() for value in read)):
            raise FedExPError(
                f"the step of {name} is not finite, and was not taken: lower the inner learning "
                "rate or clip the inner gradients; catch this error to skip the round"
            )
        self._store_state(params, before, state)
        for param, iterate in zip(params, iterates, strict=True):
            if self.rule.average_last == 2:  # the initial model is not an iterate
                last = param if AVERAGE in self.state[param] else iterate
                self.state[param][AVERAGE] = (last + iterate) / 2
            param.copy_(iterate)
        counts = {"count": count, "dropped": dropped} if sums else {}
        self.metrics = {key: float(value) for key, value in {**metrics, **counts}.items()}

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Let the parameters be the output model inside a block, to evaluate or store it.

        FedExP's output is the mean of the last two iterates (sec. 5), which is only evaluated, not
        trained on. For rules without averaging it is the last iterate, if used right after `step`.
        """
        params = [param for param in self._params() if AVERAGE in self.state.get(param, {})]
        iterates = [param.detach().clone() for param in params]
        try:
            with torch.no_grad():
                for param in params:
                    param.copy_(self.state[param][AVERAGE])
            yield
        finally:
            with torch.no_grad():
                for param, iterate in zip(params, iterates, strict=True):
                    param.copy_(iterate)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the same rule; the next steps are bit for bit those of its optimizer."""
        stored = {name for values in state_dict["state"].values() for name in values} - {AVERAGE}
        names = set(self.rule.init(torch.zeros(1)))
        require(
            stored in (set(), names),
            f"the state is of another rule: it has {', '.join(sorted(stored))}, where "
            f"{type(self.rule).__name__} has {', '.join(sorted(names)) or 'none'}",
        )
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(numbers, self._params(), strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                # again, since torch casts it to the type of the parameter
                self.state[param][name] = value.to(param.device, copy=True)

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _trained(self) -> list[Tensor]:
        return [param for param in self._params() if param.requires_grad]

    def _gradient(self, params: Sequence[Tensor]) -> Tensor:
        """Return the vector of `.grad`; refuse a parameter that has none."""
        grads = [param.grad for param in params if param.grad is not None]
        require(
            len(grads) == len(params) > 0,
            f"{len(params) - len(grads)} of {len(params)} trainable parameters have no .grad: set "
            "the pseudo-gradient of all of them (outer.set_pseudo_gradients), and use an optimizer "
            "for each fragment of a model whose fragments are averaged in turn",
        )
        return _vector(grads)

    def _rule_state(self, params: Sequence[Tensor], before: Tensor) -> State:
        """Return the state of the rule for the vector of these parameters."""
        state = dict(self.rule.init(before))
        for name, initial in state.items():
            stored = [self.state.get(param, {}).get(name) for param in params]
            if initial.shape == before.shape:
                parts = zip(stored, _split(initial, params), strict=True)
                values = [part if value is None else value.to(part) for value, part in parts]
                state[name] = torch.cat([value.flatten() for value in values])
            else:
                state[name] = next((v for v in stored if v is not None), initial).to(initial)
        return state

    def _store_state(self, params: Sequence[Tensor], before: Tensor, state: State) -> None:
        """Store the rule's state: vectors by parameter, whatever the model shares with all."""
        for name, value in state.items():
            if value.shape == before.shape:
                for param, part in zip(params, _split(value, params), strict=True):
                    self.state[param][name] = part.to(param.device, copy=True)
            else:
                for param in self._params():
                    self.state[param][name] = value


def _split(vector: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts of a vector, in the shapes of the parameters."""
    parts = vector.split([param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors as one vector on the device of the first, in float32 or wider."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return torch.cat([tensor.detach().flatten().to(tensors[0].device, dtype) for tensor in tensors])
