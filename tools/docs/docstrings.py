"""Docstrings as the reference shows them: doctests as code, names and documents as links.

An extension of griffe, which reads the sources for mkdocstrings. Docstrings stay plain text in the
code: `simulate` in backticks, docs/paper.md#epsilon as a path, and `>>>` without a fence.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?m)^(?P<indent> *)>>> (?:.*\n?)(?:(?P=indent)(?! *$).+\n?)*")
DOCUMENT = re.compile(r"(?<![\w/\[`])(?<!\]\()docs/(?P<path>[\w/-]+\.md)(?P<anchor>#[\w-]+)?")
COLONS = re.compile(r"::$", re.MULTILINE)  # before an indented block
NAME = re.compile(r"(?<![`\[\w])`(?P<name>[A-Za-z_][\w.]*)`(?![`\]])")


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of the package when it has been read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        public = {name: _path(pkg, name) for name in map(str, pkg.exports or ())}
        for each in _objects(pkg):
            if each.docstring is not None:
                each.docstring.value = rewritten(each.docstring.value, public, each.name)


def _path(pkg: griffe.Module, name: str) -> str:
    """Return the path of a public name in the reference.

    A function that is imported from a module of its own name is found by its full path only.
    """
    member = pkg.members[name]
    if isinstance(member, griffe.Alias) and member.target_path.startswith(f"{pkg.path}."):
        parent, _, last = member.target_path.removeprefix(f"{pkg.path}.").rpartition(".")
        imports = pkg[parent].imports if parent else {}
        if last in imports and isinstance(pkg[parent].members[last], griffe.Module):
            return str(imports[last])
    return f"{pkg.path}.{name}"


def _objects(parent: griffe.Object) -> list[griffe.Object]:
    """Return all objects of a package that are defined in it."""
    own = [m for m in parent.members.values() if isinstance(m, griffe.Object)]
    return [parent, *(below for member in own for below in _objects(member))]


def rewritten(text: str, public: dict[str, str], own: str = "") -> str:
    """Return a docstring in Markdown.

    Args:
        text: the docstring.
        public: full path by public name; these names become links.
        own: name of the object itself, which is not a link.

    >>> rewritten("Call `run` (docs/paper.md#epsilon).", {"run": "fedexp.run"})
    'Call [`run`][fedexp.run] ([docs/paper.md](../paper.md#epsilon)).'
    >>> rewritten(">>> 1 + 1\\n2", {}).splitlines()
    ['```pycon', '>>> 1 + 1', '2', '```']
    """

    def link(match: re.Match[str]) -> str:
        name = match["name"]
        return f"[`{name}`][{public[name]}]" if name in public and name != own else match[0]

    def document(match: re.Match[str]) -> str:
        path = match["path"]
        return f"[docs/{path}](../{path}{match['anchor'] or ''})"

    def fence(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0].rstrip()}\n{indent}```\n"

    def prose(part: str) -> str:
        return COLONS.sub(":", NAME.sub(link, DOCUMENT.sub(document, part)))

    parts, last = [], 0
    for match in DOCTEST.finditer(text):
        parts += [prose(text[last : match.start()]), fence(match)]
        last = match.end()
    return "".join([*parts, prose(text[last:])]).rstrip()
