"""The spec of a run on Flower: all that decides what it computes, as `spec.toml` holds it."""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import tomli_w
from flwr.app import ConfigRecord

from fedexp.flower.layout import Layout
from fedexp.flower.settings import Settings
from fedexp.flower.training import Training

if TYPE_CHECKING:
    from fedexp.flower.strategy import RuleStrategy


def frozen(strategy: RuleStrategy, training: Training, config: ConfigRecord) -> dict[str, Any]:
    """The spec, with the words of a simulated one where they mean the same."""
    settings = training.settings
    spec = {
        "task": settings.name,
        "algorithm": settings.algorithm.name,
        "mode": "paper",
        "seed": settings.seed,
        "rounds": training.rounds,
        "evaluate_every": 1,
        "engine": "flower",
        "deterministic": False,
        "study": training.study,
        "model": _model(training.server.layout),
        "set": {},
        "options": _options(strategy, settings, config),
    }
    return tomllib.loads(tomli_w.dumps(spec))


def _options(strategy: RuleStrategy, settings: Settings, config: ConfigRecord) -> dict[str, Any]:
    algorithm = settings.algorithm
    options = {
        **_fields(algorithm.client),
        **_fields(algorithm.server),
        "average_last": algorithm.iterates,
        "weighting": settings.weighting,
        "fraction_train": strategy.fraction_train,
        "min_train_nodes": strategy.min_train_nodes,
        "total_clients": settings.total_clients,
        "max_norm": settings.max_norm,
        "min_replies": settings.min_replies if settings.min_replies > 1 else None,
        "weighted_by_key": _weight_key(strategy, settings),
        **{f"privacy.{name}": value for name, value in _fields(settings.privacy).items()},
        **{f"secure.{name}": value for name, value in _fields(settings.secure).items()},
        **{f"train_config.{name}": value for name, value in config.items()},
    }
    return {name: _plain(value) for name, value in options.items() if value is not None}


def _weight_key(strategy: RuleStrategy, settings: Settings) -> str | None:
    """Return the metric that weighs clients where it is not the usual one."""
    key = strategy.weighted_by_key
    return None if settings.weighting == "uniform" or key == "num-examples" else key


def _fields(rule: Any) -> dict[str, Any]:
    """The options of a rule or of settings, which are dataclasses; nothing of None."""
    if not is_dataclass(rule):
        return {}
    return {each.name: getattr(rule, each.name) for each in fields(rule)}


def _plain(value: Any) -> Any:
    """As TOML holds it; infinity in words, as everywhere, and so is what only Python knows."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _model(layout: Layout) -> str:
    """The model in a few words, and a digest of the names, shapes and types of its arrays."""
    slots = "\n".join(f"{s.name} {s.shape} {s.dtype} {s.kind}{s.source}" for s in layout.slots)
    digest = hashlib.sha256(slots.encode()).hexdigest()[:10]
    return f"{len(layout.slots)} arrays, {layout.dim} parameters ({digest})"
