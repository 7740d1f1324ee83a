"""`OuterManager`: the manager of torchft, which also averages the squared norms for FedExP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedexp.aggregate import norms
from fedexp.errors import FedExPError, require
from fedexp.optional import extra
from fedexp.outer.optimizer import OuterOptimizer

if TYPE_CHECKING:
    from torchft.manager import Manager
else:
    Manager = extra("torchft.manager", "fedexp.outer.torchft", "torchft", "torchft").Manager


class OuterManager(Manager):
    """A `torchft.manager.Manager` for DiLoCo with an `OuterOptimizer`.

    It adds the squared norms of the pseudo-gradients that DiLoCo all-reduces, and averages them
    before the vote on a round, as two more numbers; the outer step does not communicate.

    - A replica that recovers gets the weights of another one, its donor, which would count twice.
      In that round it adds nothing to the means, and counts in the metric `dropped`.
    - If an update is not finite, all replicas vote against the round and return to the weights
      before it. As after any failed vote, the outer optimizer is as it was.

    DiLoCo needs `use_async_quorum=False`. With the default `init_sync=True` all replicas but one
    recover in the first round; `init_sync=False` is for replicas that start with equal weights.

    Args:
        outers: the outer optimizer, or those of DiLoCo's fragments in their order.
        options: of torchft's manager, by name.
    """

    def __init__(self, *outers: OuterOptimizer, **options: Any) -> None:
        super().__init__(**options)
        self._outers = outers

    def start_quorum(self, *args: Any, **options: Any) -> None:
        require(
            not any(outer.sums for outer in self._outers),
            "no outer step followed the last round: use torchft's DiLoCo, which takes it; LocalSGD "
            "has no outer optimizer, and is DiLoCo with the rule fedexp.Average()",
        )
        self._sq_norms: list[Tensor] = []
        self._has_recovered = False
        super().start_quorum(*args, **options)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        super().load_state_dict(state_dict)
        self._has_recovered = True  # in a quorum; start_quorum clears what a checkpoint sets

    def allreduce(self, tensor: Tensor, *args: Any, **options: Any) -> Any:
        if self._has_recovered:
            tensor.zero_()
        self._sq_norms.append(norms(tensor.flatten()[None])[0].square())
        return super().allreduce(tensor, *args, **options)

    def should_commit(self, *args: Any, **options: Any) -> bool:
        sq_norm = torch.stack(self._sq_norms).sum()
        means = torch.stack([sq_norm, torch.full_like(sq_norm, not self._has_recovered)])
        super().allreduce(means).wait()
        if not means.isfinite().all():
            self.report_error(FedExPError("the pseudo-gradient of a replica is not finite"))
        replicas, step = self.num_participants(), self.current_step()
        committed = super().should_commit(*args, **options)
        if committed:
            mean_sq_norm, weight = means.tolist()
            count = round(weight * replicas)
            self._outers[step % len(self._outers)].set_sums(
                sq_norm=mean_sq_norm, weight=weight, count=count, dropped=replicas - count
            )
        return committed
