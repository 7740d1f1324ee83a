"""Seconds from the start of `fedexp run` to its first record, beyond those of `import torch`.

On an H200 with warm caches (2026-11-16, two turns): digits MLP 0.94, EMNIST CNN 0.80, ResNet-18
1.3; with empty ones 4.3, 8.6 and 11.6 (`records/2026-11-16-h200-startup.json`). Without bytecode,
one turn before all kernels of a round were compiled at once: 1.1, 1.4 and 2.1; 4.1, 8.7 and 13.7
(`records/2026-11-16-h200-startup-no-bytecode.json`).

Three pieces of work on generated data (digits MLP, EMNIST CNN, ResNet-18 with GroupNorm), each in
processes of their own: with empty caches of Triton and torch, with warm ones, and both without
cached bytecode where `--no-bytecode` is given. Also `import fedexp` and `fedexp --help`. Prints a
table with the range and, with --out, writes it as JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fedexp.analysis.tables import text_table
from machine import Row, Timing, hardware, write_record

TASKS = Path(__file__).with_name("startup_tasks.py")
WORKS = {"digits MLP": "mlp", "EMNIST CNN": "emnist", "ResNet-18": "resnet"}
LONGEST = 300  # seconds


def seconds_to_first_record(
    task: str, device: str, precision: str, env: Mapping[str, str]
) -> float:
    """Return the time from the start of the process to the line of its first round."""
    command = [sys.executable, "-m", "fedexp", "run", f"{TASKS}:{task}", "--quiet", "--no-save"]
    command += ["--rounds", "2", "--device", device, "--precision", precision]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=dict(env)
    ) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("round 1/"):
                took = time.perf_counter() - began
                process.wait(LONGEST)
                return took
    raise RuntimeError(f"{task} has no first round: {''.join(lines)}")


def seconds_of(command: list[str], env: Mapping[str, str]) -> float:
    """Return the time of a command."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=dict(env), timeout=LONGEST)
    return time.perf_counter() - began


def measure(names: list[str], device: str, precision: str, turns: int, bytecode: bool) -> list[Row]:
    """Return one row per work and state of the caches, times in milliseconds."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        env = dict(os.environ)
        if bytecode:
            env["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "bytecode")
            env.pop("PYTHONDONTWRITEBYTECODE", None)
        else:
            env.pop("PYTHONPYCACHEPREFIX", None)
            env["PYTHONDONTWRITEBYTECODE"] = "1"
        python = [sys.executable, "-c"]
        seconds_of([*python, "import torch, fedexp.cli.main"], env)  # writes the bytecode
        torch = partial(seconds_of, [*python, "import torch"], env)
        base = Timing(tuple(1e3 * torch() for _ in range(turns)))
        rows.append({"work": "import torch", "caches": "", **base.row()})
        plain = {"import fedexp": [*python, "import fedexp"]}
        plain["fedexp --help"] = [sys.executable, "-m", "fedexp_command", "--help"]
        for name, command in plain.items():
            took = Timing(tuple(1e3 * seconds_of(command, env) for _ in range(turns)))
            rows.append({"work": name, "caches": "", **took.row()})
            print(rows[-1], flush=True)
        for name, task in WORKS.items():
            if not any(wanted in name for wanted in names):
                continue
            cold: list[float] = []
            warm: list[float] = []
            for turn in range(turns):
                cache = Path(folder) / "cache"
                shutil.rmtree(cache, ignore_errors=True)
                own = env | {
                    "TRITON_CACHE_DIR": str(cache / "triton"),
                    "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
                    "XDG_CACHE_HOME": str(cache / "xdg"),
                    "CUDA_CACHE_PATH": str(cache / "cuda"),
                }
                first = partial(seconds_to_first_record, task, device, precision, own)
                if turn == 0 or turns <= 3:
                    cold.append(1e3 * (first() - base.median / 1e3))
                warm.append(1e3 * (first() - base.median / 1e3))
            for state, times in (("empty", cold), ("warm", warm)):
                rows.append({"work": name, "caches": state, **Timing(tuple(times)).row()})
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--works", nargs="*", default=[""])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--no-bytecode", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    where = hardware(args.device)
    rows = measure(args.works, args.device, args.precision, args.turns, not args.no_bytecode)
    head = ["work", "caches", "ms", "ms_min", "ms_max", "turns"]
    print(text_table(head, [[str(row[name]) for name in head] for row in rows]))
    if args.out is not None:
        settings = {"bytecode": not args.no_bytecode, "precision": args.precision}
        write_record(args.out, where, rows, **settings)


if __name__ == "__main__":
    main()
