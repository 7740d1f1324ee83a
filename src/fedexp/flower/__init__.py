"""The algorithms of this package on Flower: strategies for ServerApps, rules for ClientApps."""

from typing import TYPE_CHECKING, Any

from fedexp.optional import extra

extra("flwr", "fedexp.flower", group="flower")

from fedexp.flower.client import LocalRule  # noqa: E402
from fedexp.flower.client_state import report_client_id  # noqa: E402
from fedexp.flower.layout import Layout  # noqa: E402
from fedexp.flower.privacy import local_privacy  # noqa: E402
from fedexp.flower.secure.payload import SecureAggregation  # noqa: E402
from fedexp.flower.server import Server  # noqa: E402
from fedexp.flower.simulated_client import (  # noqa: E402
    central_evaluation,
    initial_arrays,
    simulated_evaluate,
    simulated_train,
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
    from fedexp.flower.secure.client import SecureMod, secure_mod

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
    "initial_arrays",
    "local_privacy",
    "report_client_id",
    "secure_mod",
    "simulated_evaluate",
    "simulated_train",
]


def __getattr__(name: str) -> Any:
    """Import `secure_mod` on first use, as it needs Flower's legacy workflow."""
    if name in ("SecureMod", "secure_mod"):
        from fedexp.flower.secure import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
