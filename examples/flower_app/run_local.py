"""FedAvg and FedExP on this machine: a SuperLink, SuperNodes, TLS, and a picture of both curves.

python run_local.py                      # 3 nodes, 12 rounds of digits each, some minutes
python run_local.py --nodes 5 --rounds 30 --algorithms fedavg,fedexp,scaffold-exp
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from fedexp.algorithms import ALGORITHMS
from fedexp.analysis.plots import check_writable, comparison_figure, save
from fedexp.analysis.summary import summarise
from fedexp.analysis.tables import comparison_table, text_table
from fedexp.errors import FedExPError, UsageError, unknown_name
from fedexp.runs import is_run, load_run
from fedexp.tasks.task import Task
from fedexp_app.settings import load_task
from local_federation import FederationError, LocalFederation

HERE = Path(__file__).resolve().parent
SECONDS_A_ROUND = 120  # what a round may take before we give a run up


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop all and go
    out = args.out.resolve()
    picture = out / f"{args.task}.png"
    try:
        if HERE in out.parents and out != HERE / "out":
            raise UsageError(f"{out} would be sent to the nodes with the app; choose another --out")
        check_writable(picture)
        names = args.algorithms.split(",")
        for name in names:  # report mistakes before anything starts
            if name not in ALGORITHMS:
                raise unknown_name("algorithm", name, ALGORITHMS)
        task = load_task(args.task, args.nodes, args.seed)
        show(task, args.nodes, train(args, names, out), picture)
    except (FederationError, FedExPError) as error:
        print(f"run_local: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrun_local: interrupted; the same command resumes from here", file=sys.stderr)
        return 130
    print(f"\nruns and logs are in {out}, the picture is {picture}")
    return 0


def train(args: argparse.Namespace, names: list[str], out: Path) -> list[Path]:
    """Run each algorithm on one federation; returns the folders of the runs."""
    settings = f"n{args.nodes}-r{args.rounds}-s{args.seed}"
    folders = [out / "runs" / f"{args.task}-{name}-{settings}" for name in names]
    print(f"starting a SuperLink and {args.nodes} SuperNodes on 127.0.0.1, with TLS")
    with LocalFederation(out / "federation", args.nodes) as federation:
        for name, folder in zip(names, folders, strict=True):
            print(f"{name}: {args.rounds} rounds (log: {federation.folder / 'run.log'})")
            stream = federation.submit(HERE, run_config(args, name, folder))
            end = time.monotonic() + SECONDS_A_ROUND * (args.rounds + 1)
            follow(stream, folder, end)
            status, log = federation.wait(stream, end - time.monotonic())
            if status != "finished:completed":
                raise FederationError(f"{name} ended as {status}:\n{log[-2000:]}")
    return folders


def follow(stream: Popen[bytes], folder: Path, end: float) -> None:
    """Print a line a round while the run is at work."""
    shown = 0
    while True:
        over = stream.poll() is not None or time.monotonic() > end
        rows = load_run(folder).rows if is_run(folder) else []
        for row in rows[shown:]:
            accuracy = row["test_accuracy"]
            score = "" if accuracy is None else f"  test accuracy {accuracy:.1%}"
            print(f"  round {row['round']}{score}  server step {row['server_lr'] or 0:.2f}")
        shown = len(rows)
        if over:
            return
        time.sleep(1)


def show(task: Task, nodes: int, folders: list[Path], picture: Path) -> None:
    """A table and a figure of the runs, read from their folders."""
    outcomes = [load_run(folder).outcome() for folder in folders]
    rounds = max(len(outcome.rows) for outcome in outcomes)
    lines = summarise(outcomes, task.metric, task.target)
    print()
    print(text_table(*comparison_table(lines, task.metric, task.target, rounds)))
    title = f"{task.name} on Flower: a SuperLink and {nodes} SuperNodes"
    save(comparison_figure(outcomes, task.metric, task.target, title), picture)


def run_config(args: argparse.Namespace, algorithm: str, folder: Path) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "task": args.task,
        "clients": args.nodes,
        "rounds": args.rounds,
        "seed": args.seed,
        "min-nodes": args.nodes,
        "checkpoint": str(folder),
    }


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=_count, default=3, help="SuperNodes (default 3)")
    parser.add_argument("--rounds", type=_count, default=12, help="of each run (default 12)")
    parser.add_argument("--algorithms", default="fedavg,fedexp", help="default fedavg,fedexp")
    parser.add_argument("--task", default="digits", help="as `fedexp tasks` lists (default digits)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
