"""The strategy under test, as configured by the run."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from faulty_app.audit import AuditedFedExP
from faulty_app.problem import SEED, problem
from fedexp.algorithms import ALGORITHMS
from fedexp.flower import RuleStrategy, SecureAggregation, initial_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    if context.run_config["audit"]:
        _train_audited(grid, context.run_config)
        return
    for name in str(context.run_config["algorithms"]).split():
        _train(grid, context.run_config, name)


def _train(grid: Grid, config: UserConfig, name: str) -> None:
    strategy = RuleStrategy(
        fraction_evaluate=0.0,
        min_available_nodes=int(config["min-nodes"]),
        algorithm=ALGORITHMS[name](),
        seed=SEED,
        weighting="uniform",
        checkpoint=Path(str(config["checkpoint"])) / name,
        secure=SecureAggregation(clip=5.0, extras_bound=5.0) if config["secure"] else None,
    )
    strategy.start(
        grid,
        initial_arrays(problem(), SEED),
        num_rounds=int(config["rounds"]),
        timeout=float(config["timeout"]),
    )


def _train_audited(grid: Grid, config: UserConfig) -> None:
    """Train on the five clients of tools/chaos.py."""
    strategy = AuditedFedExP(
        Path(str(config["audit"])),
        fraction_evaluate=0.0,
        min_available_nodes=int(config["min-nodes"]),
        seed=SEED,
        bound=3,
        checkpoint=Path(str(config["checkpoint"])),
    )
    rounds, timeout = int(config["rounds"]), float(config["timeout"])
    strategy.start(grid, initial_arrays(problem(5), SEED), num_rounds=rounds, timeout=timeout)
