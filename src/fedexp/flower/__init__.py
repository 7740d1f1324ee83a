"""FedExP and every other rule of this package on Flower: real clients, real network."""

from typing import TYPE_CHECKING, Any

from fedexp.optional import extra

extra("flwr", "fedexp.flower", group="flower")

from fedexp.flower.client import LocalRule  # noqa: E402
from fedexp.flower.client_state import identify  # noqa: E402
from fedexp.flower.layout import Layout  # noqa: E402
from fedexp.flower.local_privacy import local_privacy  # noqa: E402
from fedexp.flower.secure_payload import SecureAggregation  # noqa: E402
from fedexp.flower.server import Server  # noqa: E402
from fedexp.flower.simulated_client import (  # noqa: E402
    central_evaluation,
    initial_arrays,
    planned,
    planned_evaluate,
)
from fedexp.flower.strategies import (  # noqa: E402
    STRATEGIES,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedExP,
    FedExPM,
    FedProx,
    FedProxExP,
    FedYogi,
    Scaffold,
    ScaffoldExP,
)
from fedexp.flower.strategy import RuleStrategy  # noqa: E402

if TYPE_CHECKING:
    from fedexp.flower.secure_client import SecureMod, secure_mod

__all__ = [
    "STRATEGIES",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedExP",
    "FedExPM",
    "FedProx",
    "FedProxExP",
    "FedYogi",
    "Layout",
    "LocalRule",
    "RuleStrategy",
    "Scaffold",
    "ScaffoldExP",
    "SecureAggregation",
    "SecureMod",
    "Server",
    "central_evaluation",
    "identify",
    "initial_arrays",
    "local_privacy",
    "planned",
    "planned_evaluate",
    "secure_mod",
]


def __getattr__(name: str) -> Any:
    """Import the client's side of secure aggregation when it is asked for: it needs Flower's
    legacy workflow, which nothing else here does."""
    if name in ("SecureMod", "secure_mod"):
        from fedexp.flower import secure_client

        return getattr(secure_client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
