"""Write the table of known layers and cards, `src/fedexp/kernels/choices.json`.

The choices are those that runs on this card have timed and stored in the user's cache. On a new
card: remove the cache, run `benchmarks/gpu_rounds.py`, then this. With deterministic algorithms the
table counts as well, so that its kernels must be deterministic, as all of them are.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from fedexp.kernels.convolution import CHOICES, layer_key
from fedexp.kernels.convolution_torch import Geometry

STORED = re.compile(r"(?P<card>.+?) torch \S+ triton \S+ (?P<direction>\w+) "
                    r"Geometry\((?P<sizes>[^)]*)\) torch\.(?P<dtype>\w+)")  # fmt: skip
FEWEST_CLIENTS = 3  # trials have fewer, and their choices do not count


def choices(cache: dict[str, str]) -> dict[str, dict[str, str]]:
    """Return the choices by card and layer.

    >>> key = "A torch 2 triton 3 forward Geometry(clients=20, batch=50, channels=64, height=8, "
    >>> key += "width=8, outputs=64, kernel_height=3, kernel_width=3, stride=1, padding=1)"
    >>> choices({key + " torch.bfloat16": "each"})
    {'A': {'forward 64x8x8-64 3x3 stride 1 padding 1 bfloat16': 'each'}}
    """
    found: dict[str, dict[str, str]] = {}
    for key, name in sorted(cache.items()):
        match = STORED.fullmatch(key)
        if match is None:
            continue
        pairs = (part.split("=") for part in match["sizes"].split(", "))
        geometry = Geometry(**{field: int(value) for field, value in pairs})
        if geometry.clients < FEWEST_CLIENTS:
            continue
        layer = layer_key(match["direction"], geometry, getattr(torch, match["dtype"]))
        found.setdefault(match["card"], {})[layer] = name
    return found


def main() -> None:
    table = json.loads(CHOICES.read_text())
    for card, layers in choices(json.loads(Path(sys.argv[1]).read_text())).items():
        table[card] = dict(sorted({**table.get(card, {}), **layers}.items()))
    CHOICES.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
