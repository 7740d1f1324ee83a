"""The parts of Flower that only secure aggregation uses, imported here and nowhere else.

SecAgg+ needs Flower's legacy workflow, which a later Flower may drop or change. So it is an extra
with an upper bound, `fedexp[flower-secure]`, and everything else works with any newer Flower. All
imports of that workflow are in this file, which therefore has nothing else.
"""

from __future__ import annotations

import flwr

from fedexp.errors import UsageError

VERSIONS = ">=1.41,!=1.42.0,<1.43"  # as in pyproject.toml

try:
    from flwr.client.mod import secaggplus_mod
    from flwr.common import (
        Code,
        FitIns,
        FitRes,
        Parameters,
        Status,
        bytes_to_ndarray,
        ndarray_to_bytes,
        ndarrays_to_parameters,
        parameters_to_ndarrays,
    )
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS,
        RECORD_KEY_STATE,
        Key,
        Stage,
    )
    from flwr.compat.common.recorddict_compat import fitres_to_recorddict
    from flwr.server import LegacyContext, SimpleClientManager
    from flwr.server.strategy import FedAvg as LegacyFedAvg
    from flwr.server.workflow import SecAggPlusWorkflow
    from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
    from flwr.server.workflow.constant import Key as WorkflowKey
    from flwr.server.workflow.secure_aggregation.secaggplus_workflow import WorkflowState
except ImportError as error:
    raise UsageError(
        f"secure aggregation needs flwr{VERSIONS}, whose legacy workflow it uses, and this is flwr "
        f"{flwr.__version__}: pip install 'fedexp[flower-secure]'"
    ) from error

__all__ = [
    "MAIN_CONFIGS_RECORD",
    "MAIN_PARAMS_RECORD",
    "RECORD_KEY_CONFIGS",
    "RECORD_KEY_STATE",
    "VERSIONS",
    "Code",
    "FitIns",
    "FitRes",
    "Key",
    "LegacyContext",
    "LegacyFedAvg",
    "Parameters",
    "SecAggPlusWorkflow",
    "SimpleClientManager",
    "Stage",
    "Status",
    "WorkflowKey",
    "WorkflowState",
    "bytes_to_ndarray",
    "fitres_to_recorddict",
    "ndarray_to_bytes",
    "ndarrays_to_parameters",
    "parameters_to_ndarrays",
    "secaggplus_mod",
]
