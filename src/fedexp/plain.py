"""A run as plain values: what TOML and JSON hold of it, and its id."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np

from fedexp.errors import UsageError, check_name, require, shown
from fedexp.identity import digest_of
from fedexp.text import convert

if TYPE_CHECKING:  # only private runs import it
    from fedexp.privacy.settings import Privacy

# What was typed, and where objects of the user's are; not part of the id.
SOURCES = ("task_source", "algorithm_source", "cohort_source", "start_source")
TYPED = ("set", "changed", *SOURCES)


def id_of(spec: Mapping[str, Any]) -> str:
    """Return the id of a resolved spec.

    Options count as they are resolved, not as they were typed.

    >>> spec = {"task": "toy", "algorithm": "fedexp", "seed": 0, "options": {"server.eps": 0.0}}
    >>> id_of({**spec, "set": {"eps": "0"}}) == id_of({**spec, "set": {}}) == id_of(spec)
    True
    """
    resolved = {name: value for name, value in spec.items() if name not in TYPED}
    text = json.dumps(_canonical(resolved), sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    task, algorithm = str(spec["task"]), str(spec["algorithm"])  # a forged file may have others
    return f"{id_stem(task, algorithm, spec['seed'])}-{digest}"


def id_stem(task: str, algorithm: str, seed: int) -> str:
    """Return the readable part of a run's id; characters that paths cannot have are replaced.

    >>> id_stem("my task", "fedexp", 0)
    'my_task-fedexp-s0'
    """
    return f"{file_name(task)}-{file_name(algorithm)}-s{seed}"


def file_name(name: str) -> str:
    """Return a name as a part of a file name.

    >>> file_name("a/b c")
    'a_b_c'
    """
    return re.sub(r"[^\w.+-]+", "_", name)


def privacy_kinds() -> dict[str, type[Privacy]]:
    """Return the classes of privacy settings by kind."""
    from fedexp.privacy.settings import CentralPrivacy, LocalPrivacy

    return {"central": CentralPrivacy, "local": LocalPrivacy}


def privacy_table(privacy: Privacy) -> dict[str, Any]:
    """Return privacy settings as a table, without those that are not set.

    >>> from fedexp.privacy import LocalPrivacy
    >>> privacy_table(LocalPrivacy(clip=1.0, delta=1e-5, noise_multiplier=2.0))
    {'kind': 'local', 'clip': 1.0, 'delta': 1e-05, 'noise_multiplier': 2.0}
    """
    kind = next((k for k, settings in privacy_kinds().items() if type(privacy) is settings), None)
    if kind is None:
        raise UsageError(
            f"privacy is {type(privacy).__name__}; give fedexp.privacy.CentralPrivacy(...) or "
            "LocalPrivacy(...)"
        )
    return {"kind": kind} | {n: v for n, v in vars(privacy).items() if v is not None}


def privacy_from(table: Any) -> Privacy:
    """Return the privacy settings of a table; the inverse of `privacy_table`."""
    require(isinstance(table, Mapping), f"privacy is {shown(table)}; write a table")
    kind, kinds = str(table.get("kind")), privacy_kinds()
    check_name("kind of privacy", kind, kinds)
    hints, values = get_type_hints(kinds[kind]), {}
    for name, value in table.items():
        if name != "kind":
            check_name(f"setting of {kind} privacy", name, hints)
            values[name] = convert(value, hints[name], name)
    missing = [name for name in ("clip", "delta") if name not in values]
    require(
        not missing,
        f"privacy needs {' and '.join(missing)}, e.g. {kind}:clip=1,delta=1e-5,noise_multiplier=1",
    )
    return kinds[kind](**values)


def plain(value: Any) -> Any:
    """Return a value as TOML holds it: None and infinity as text, an object by its digest."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, os.PathLike):
        return "none" if value is None else os.fspath(value)
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    name = getattr(value, "__name__", type(value).__name__)
    return f"{name}-{digest_of(value)[:8]}"


def _canonical(value: Any) -> Any:
    """Write equal numbers as the same text: 1 and 1.0, 0 and -0.0."""
    if isinstance(value, Mapping):
        return {name: _canonical(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values with dotted names instead of tables.

    >>> flat({"task": "toy", "options": {"server.eps": 0.0}})
    {'task': 'toy', 'options.server.eps': 0.0}
    """
    pairs: dict[str, Any] = {}
    for name, value in values.items():
        is_table = isinstance(value, Mapping)
        pairs |= flat(value, f"{prefix}{name}.") if is_table else {f"{prefix}{name}": value}
    return pairs
