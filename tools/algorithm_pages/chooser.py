"""The chooser of docs/algorithms.md as data: a situation, what to take, why, and what was measured.

Reasons are from theory, from the sources of the algorithms and from stored results. Numbers are not
part of them: the rounds of `rows` are written beside each from the leaderboard.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """A row of the chooser.

    Attributes:
        situation: what the reader has.
        take: names of pages, the first choice first.
        reason: why, and when not; links are relative to docs.
        rows: rows of the leaderboard that are shown as evidence, where two of them have runs.
        note: how to call it, behind the links.
    """

    situation: str
    take: tuple[str, ...]
    reason: str
    rows: tuple[str, ...] = ()
    note: str = ""


CHOICES = (
    Choice(
        "many clients that seldom return, few rounds, no state on clients, no search",
        ("fedexp",),
        "no server learning rate to tune, and the bytes of FedAvg. Not where clients agree "
        "(`diversity` up to 2: it takes FedAvg's steps) or the client learning rate is already at "
        "the edge of stability. [How its constant was "
        "chosen](extrapolation.md#what-the-study-showed)",
        ("fedexp", "fedexp-printed", "fedavg"),
        "`fx.fedexp()`, or `--mode recommended`",
    ),
    Choice(
        "clients participate often and can store a vector as large as the model",
        ("scaffold-exp", "scaffold"),
        "control variates remove the drift, extrapolation shortens the run. Twice the bytes; "
        "SCAFFOLD-ExP needs `max_step` where its steps oscillate "
        "([EMNIST](reproduction-appendix.md#scaffold-exp)); refused with privacy",
        ("scaffold-exp", "scaffold", "fedavg"),
    ),
    Choice(
        "you can afford a search of the server learning rate",
        ("fedadam", "fedyogi"),
        "a step size per coordinate. With an untuned `lr` they can be slower than FedAvg; "
        "`tau` matters as much",
        ("fedadam", "fedyogi", "fedavg"),
    ),
    Choice(
        "sparse or badly scaled gradients, as with text",
        ("fedadam", "fedadagrad"),
        "rare coordinates get longer steps (Reddi et al., 2021). FedAdagrad's steps only shrink: "
        "for short runs",
        ("fedadam", "fedadagrad", "fedavg"),
    ),
    Choice(
        "small cohorts, noisy rounds, a server learning rate that is tuned anyway",
        ("fedavgm",),
        "averages over rounds; state on the server only. Lower `lr` first: the effective step is "
        "lr / (1 - beta)",
        ("fedavgm", "fedavg"),
    ),
    Choice(
        "clients do unequal work (`local.epochs` on unequal data)",
        ("fednova",),
        "FedAvg then converges to the optimum of another objective. With a fixed number of steps, "
        "as on every task of the leaderboard but Shakespeare, it is FedAvg: the numbers beside "
        "differ by rounding alone. Refused with privacy",
        ("fednova", "fedavg"),
    ),
    Choice(
        "many local steps that drift apart, no state on clients",
        ("fedprox", "fedprox-exp"),
        "bounds the drift by one number. Where drift is no problem the best `mu` is the smallest, "
        "and it is FedAvg",
        ("fedprox", "fedprox-exp", "fedavg"),
    ),
    Choice(
        "no client learning rate to tune",
        ("delta-sgd",),
        "clients choose their learning rates from the change of their gradients. A first one is "
        "still needed, and SCAFFOLD and FedNova refuse it",
        ("delta-sgd", "fedavg"),
        "as `local.optimizer`",
    ),
    Choice(
        "differential privacy",
        ("fedexp", "fedavg"),
        "the noised squared norms are part of one release, and the step falls to FedAvg's where "
        "noise dominates ([step size under noise](privacy.md#the-step-size-under-noise)). "
        "SCAFFOLD, FedNova and FedExProx-StoPS are refused",
    ),
    Choice(
        "secure aggregation, or any server that sees sums only",
        ("fedexp", "fedavg"),
        "one scalar per client beside the sum of updates ([what the server "
        "needs](paper.md#sums-only)); any rule works whose sums are these",
    ),
    Choice(
        "all clients can fit one model (interpolation)",
        ("fedexp", "fedexprox-grads"),
        "`eps=0`: the mean update vanishes faster than the updates, and very long steps are right "
        "([where eps should be 0](extrapolation.md#where-eps-should-be-0)). Not for networks on "
        "real clients, which do not interpolate within a run",
    ),
    Choice(
        "a baseline for a paper",
        ("fedavg", "fedexp", "scaffold", "fedadam"),
        "with the same budget of trials for each ([protocol of the "
        "leaderboard](leaderboard.md#protocol))",
        ("fedavg", "fedexp", "scaffold", "fedadam"),
    ),
)
