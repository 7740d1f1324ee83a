"""Documents with generated blocks: prose by hand around what the records say."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedexp.errors import UsageError, unknown_name

BLOCK = re.compile(r"<!-- begin (?P<name>[\w-]+) -->\n.*?<!-- end (?P=name) -->", re.DOTALL)
MARK = re.compile(r"<!-- (?:begin|end) [\w-]+ -->")
LINK = re.compile(r"\]\(\S+\)")
# Digits that are no results: names, the paper's own numbering, what is in `code`.
NAMES = re.compile(
    r"`[^`\n]*`|CIFAR-10{1,2}\b|CINIC-10\b|ResNet-18\b|ICLR 2023\b|bf16\b|float32\b|tf32\b"
    r"|(?:Tables?|Figures?|[Ss]ections?|App\.) [A-Z]?[\d.]+(?:(?: to | and |, )\d+)*"
)


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """Put the blocks between their marks; refuses a mark without a block or without its end.

    >>> fill("a <!-- begin x -->\\nold\\n<!-- end x --> b", {"x": "new"})
    'a <!-- begin x -->\\nnew\\n<!-- end x --> b'
    """
    for name in (match["name"] for match in BLOCK.finditer(text)):
        if name not in blocks:
            raise unknown_name("block", name, blocks)
    if stray := MARK.search(BLOCK.sub("", text)):
        raise UsageError(f"{stray.group()} stands alone; put its begin or its end back")
    return BLOCK.sub(lambda match: _block(match["name"], blocks[match["name"]]), text)


def loose_numbers(text: str) -> list[str]:
    """The lines outside of blocks, fences and links that have a number nobody generated.

    >>> loose_numbers("See Table 1 of CIFAR-10.\\nIt took 312 rounds.")
    ['It took 312 rounds.']
    """
    prose = re.sub(r"```.*?```", "", BLOCK.sub("", text), flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not line.startswith("    ")]
    return [line for line in lines if re.search(r"\d", NAMES.sub("", LINK.sub("", line)))]


def _block(name: str, text: str) -> str:
    return f"<!-- begin {name} -->\n{text}\n<!-- end {name} -->"
