"""The code of a Markdown page: its blocks, in order, and the commands in its sentences.

A block is fenced and names its language, or is indented and consists of commands. Two comments,
which readers do not see, change what the tests do:

    <!-- setup
    x = ...                     # Python that the blocks below it need
    -->
    <!-- no-run: reason -->     # the next block is parsed or compiled, but not executed

A block that is neither fails, so that no code of a page remains unexecuted by accident.
"""

from __future__ import annotations

import ast
import math
import re
import shlex
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Literal

Kind = Literal["python", "commands", "toml", "json", "text"]

# Languages of fenced blocks; "text" is output, a formula or a citation, and is not executed.
LANGUAGES: dict[str, Kind] = {
    **dict.fromkeys(("python", "py"), "python"),
    **dict.fromkeys(("console", "bash", "sh", "shell"), "commands"),
    "toml": "toml",
    "json": "json",
    **dict.fromkeys(("text", "bibtex", "math"), "text"),
}
# The first word of an indented block of commands, which has no language. Those of the last line are
# not known to `commands`: they need a reason not to run.
PROGRAMS = (
    *("fedexp", "python", "python3", "pip", "make", "torchrun", "srun", "export", "git", "cd"),
    *("flwr", "flower-superlink", "flower-supernode"),
    *("docker", "ssh", "scp", "curl", "wget", "npm", "uv", "conda", "sbatch", "sudo", "source"),
)

CLOSE = 0.01  # relative difference of printed numbers: float32 training on another processor
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")

_FENCE = re.compile(r"(?P<indent>\s*)(?P<ticks>`{3,}|~{3,})(?P<info>[^`]*)")
_ITEM = re.compile(r"\s*([-*+]|\d+[.)])\s|\s*(!!!|\?\?\?\+?|===)\s")  # list, admonition, tab
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_PROGRAM = re.compile(rf"(\w+=\S+ )*({'|'.join(PROGRAMS)})( |$)")
_STATEMENT = re.compile(r"(from|import|def|class|for|with|async|@\w+)\b", re.MULTILINE)


class PageError(AssertionError):
    """A block that the tests cannot classify."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        line: number of its first line in the page, from 1.
        kind: what it is.
        text: its code, without the indentation that all lines share.
        no_run: why it is not executed; None where it is.
        is_hidden: whether it is the code of a `setup` comment.
    """

    line: int
    kind: Kind
    text: str
    no_run: str | None = None
    is_hidden: bool = False


@dataclass
class Page:
    """The blocks of a page, and the commands in its sentences with their line numbers."""

    blocks: list[Block] = field(default_factory=list)
    inline: list[tuple[int, str]] = field(default_factory=list)


def parse_page(text: str) -> Page:
    """Return the code of a page; raises `PageError` for a block that is not one of `LANGUAGES`."""
    lines, page = text.splitlines(), Page()
    prose = [""] * len(lines)
    reason: tuple[int, str] | None = None
    at, in_item, after_blank = 0, False, True

    def add(first: int, kind: Kind, code: list[str], is_hidden: bool = False) -> None:
        nonlocal reason
        why = None
        if not is_hidden and reason is not None:
            why, reason = reason[1], None
        page.blocks.append(Block(first + 1, kind, dedent("\n".join(code)), why, is_hidden))

    while at < len(lines):
        line, start = lines[at], at
        if line.lstrip().startswith("<!--"):
            end = next(k for k in range(at, len(lines)) if "-->" in lines[k])
            if line.strip() == "<!-- setup":
                add(at + 1, "python", lines[at + 1 : end], is_hidden=True)
            elif found := re.search(r"<!-- no-run: (.+?) -->", line):
                reason = at + 1, found[1]
            at, after_blank = end + 1, True
        elif fence := _FENCE.fullmatch(line):
            close = re.compile(rf"\s*{fence['ticks'][0]}{{{len(fence['ticks'])},}}\s*")
            end = next(k for k in range(at + 1, len(lines)) if close.fullmatch(lines[k]))
            add(at + 1, _language(fence["info"], at + 1), lines[at + 1 : end])
            at, after_blank = end + 1, True
        elif after_blank and _is_indented(line) and (not in_item or _is_command(line)):
            end = _end_of_indented(lines, at)
            code = lines[at:end]
            add(at, _kind_of_indented(dedent("\n".join(code)), at + 1), code)
            at, after_blank = end, True
        else:
            prose[at] = line
            if line.strip() and not _is_indented(line):
                in_item = bool(_ITEM.match(line)) or (in_item and not after_blank)
            after_blank = not line.strip()
            at += 1
        assert at > start
    if reason is not None:
        raise PageError(f"line {reason[0]}: no block follows this no-run")
    page.inline = _inline_commands("\n".join(prose))
    return page


def _language(info: str, line: int) -> Kind:
    """Return the kind of a fence, e.g. of `python title="study.py"` or `{ .python .annotate }`."""
    words = info.replace("{", " ").replace("}", " ").split()
    name = words[0].lstrip(".") if words else ""
    if name not in LANGUAGES:
        known = ", ".join(LANGUAGES)
        raise PageError(f"line {line}: say what this block is ({name or 'no language'}): {known}")
    return LANGUAGES[name]


def _is_indented(line: str) -> bool:
    return line.startswith(("    ", "\t")) and bool(line.strip())


def _is_command(line: str) -> bool:
    return _PROGRAM.match(line.strip()) is not None


def _end_of_indented(lines: list[str], start: int) -> int:
    """Return where an indented block ends: at the last line that is indented."""
    end = at = start
    while at < len(lines) and (_is_indented(lines[at]) or not lines[at].strip()):
        at += 1
        if _is_indented(lines[at - 1]):
            end = at
    return end


def _kind_of_indented(code: str, line: int) -> Kind:
    """Return "commands", or "text" for what is no code (formulas, tables)."""
    first = next((each for each in code.splitlines() if not each.startswith("#")), "")
    if _is_command(first):
        return "commands"
    hidden = any(_is_command(each) for each in code.splitlines()) and code.startswith("#")
    if hidden or _STATEMENT.match(code) or _is_python(code):
        raise PageError(f"line {line}: say what this block is: fence it, with its language")
    return "text"


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _inline_commands(prose: str) -> list[tuple[int, str]]:
    return [
        (prose.count("\n", 0, each.start()) + 1, each[1].replace("\n", " "))
        for each in _INLINE.finditer(prose)
        if _is_command(each[1]) and " " in each[1]
    ]


def split_commands(text: str) -> list[list[str]]:
    """Return the commands of a block as words, without comments, prompts and what follows a pipe.

    In a block with prompts (`$ `) the lines without one are output.

    >>> split_commands("$ A=1 fedexp toy; make test | head  # both\\nwrote toy.png")
    [['fedexp', 'toy'], ['make', 'test']]
    """
    text = re.sub(r"\\\n\s*", " ", text)
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    commands = []
    for line in lines:
        line = re.sub(r"\$\([^)]*\)", "SUBSTITUTED", line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|>")
        lexer.whitespace_split = True
        command, skips = list[str](), False
        for word in [*lexer, ";"]:
            if word in (";", "&&", "&"):
                commands.append(command)
                command, skips = [], False
            elif word in ("|", ">", ">>"):
                skips = True
            elif not skips and (command or not re.match(r"[A-Z_]+=", word)):
                command.append(word)
    return [command for command in commands if command]


def agree(found: str, expected: str) -> bool:
    """Return whether the texts are equal, with numbers that are close to each other."""
    texts = [" ".join(NUMBER.sub("#", text).split()) for text in (found, expected)]
    pairs = zip(NUMBER.findall(found), NUMBER.findall(expected), strict=False)
    close = (math.isclose(float(a), float(b), rel_tol=CLOSE, abs_tol=1e-3) for a, b in pairs)
    return texts[0] == texts[1] and all(close)
