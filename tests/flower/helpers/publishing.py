"""Flower's own rules for an app that is published, and ours: public names only."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

from flwr.cli.build import build, build_fab_from_disk
from flwr.cli.utils import collect_files, filter_paths_for_publish
from flwr.supercore.constant import (
    APP_PUBLISH_ALLOWED_LICENSE_FILES,
    MAX_FILE_BYTES,
    MAX_FILE_COUNT,
    MAX_TOTAL_BYTES,
)

DESCRIPTION = 200  # characters above which `flwr app publish` asks whether it is meant
PUBLIC = ("fedexp", "fedexp.flower")


def broken_rules(app: Path) -> list[str]:
    """Return the rules of `flwr app publish` that a folder breaks; `flwr build` raises for others.

    All of the folder is to be published, but for bytecode.
    """
    build(app)  # names, configuration and format; writes the bundle into the working directory
    files = {name: app / name for name in filter_paths_for_publish(collect_files(app))}
    all_files = {name for name in collect_files(app) if "__pycache__" not in name}
    sizes = [path.stat().st_size for path in files.values()]
    for path in files.values():
        path.read_text(encoding="utf-8")  # raises for what the hub refuses
    config = tomllib.loads((app / "pyproject.toml").read_text())
    bundle = ZipFile(BytesIO(build_fab_from_disk(app))).namelist()
    components = config["tool"]["flwr"]["app"]["components"].values()
    modules = [name.partition(":")[0].replace(".", "/") + ".py" for name in components]
    rules = {
        "a licence in the folder": config["project"]["license"]["file"]
        in APP_PUBLISH_ALLOWED_LICENSE_FILES,
        "a licence in the bundle": config["project"]["license"]["file"] in bundle,
        "a description": 0 < len(config["project"]["description"].strip()) <= DESCRIPTION,
        "the newest format of bundles": config["tool"]["flwr"]["app"]["fab-format-version"] == 1,
        "few files": len(files) <= MAX_FILE_COUNT,
        "small files": max(sizes) <= MAX_FILE_BYTES,
        "a small app": sum(sizes) <= MAX_TOTAL_BYTES,
        "kinds of files that the hub takes": all_files == files.keys(),
        "both components in the bundle": {*modules} <= {*bundle},
    }
    return [rule for rule, holds in rules.items() if not holds]


def internals(package: Path) -> list[str]:
    """Return what the modules of an app use beside public names, torch, Flower and Python's own."""
    wrong = []
    usual = {"torch", "flwr", package.name, *sys.stdlib_module_names}
    for path in package.rglob("*.py"):
        for module, name in _used(ast.parse(path.read_text())):
            is_public = module in PUBLIC and (not name or name in import_module(module).__all__)
            if module.partition(".")[0] not in usual and not is_public:
                wrong.append(f"{path.name}: {module} {name}")
    return wrong


def _used(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports, with the names that it uses of them ("" for none)."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            aliases.update({alias.asname or alias.name: alias.name for alias in node.names})
    yield from ((module, "") for module in aliases.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = aliases.get(node.value.id)
            yield from [(module, node.attr)] if module in PUBLIC else []
