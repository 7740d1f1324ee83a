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

import fedexp as fx
from fedexp.flower import STRATEGIES
from fedexp.runs import is_run, load_run
from local_federation import FederationError, LocalFederation

APP = Path(__file__).resolve().parent / "fedexp-app"
SECONDS_A_ROUND = 120  # what a round may take before we give a run up


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: stop all and go
    out = args.out.resolve()
    picture = out / "digits.png"
    try:
        if APP in (out, *out.parents):
            raise fx.UsageError(
                f"{out} would be sent to the nodes with the app; choose another --out"
            )
        names = args.algorithms.split(",")
        for name in names:  # report mistakes before anything starts
            if name not in STRATEGIES:
                raise fx.UsageError(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}")
        out.mkdir(parents=True, exist_ok=True)
        show(args.nodes, train(args, names, out), picture)
    except (FederationError, fx.FedExPError, OSError) as error:
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
    folders = [out / "runs" / f"digits-{name}-{settings}" for name in names]
    print(f"starting a SuperLink and {args.nodes} SuperNodes on 127.0.0.1, with TLS")
    with LocalFederation(out / "federation", args.nodes) as federation:
        for name, folder in zip(names, folders, strict=True):
            print(f"{name}: {args.rounds} rounds (log: {federation.folder / 'run.log'})")
            stream = federation.submit(APP, run_config(args, name, folder))
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


def show(nodes: int, folders: list[Path], picture: Path) -> None:
    """Print the last test accuracy of the runs, and draw all of them, read from their folders."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    print(f"\n{'algorithm':15} rounds  test accuracy")
    for run in map(load_run, folders):
        name, rows = run.spec["algorithm"], run.rows
        print(f"{name:15} {len(rows):6}  {rows[-1]['test_accuracy']:13.1%}")
        axes.plot(
            [row["round"] for row in rows], [row["test_accuracy"] for row in rows], label=name
        )
    axes.set(title=f"Digits on Flower, {nodes} SuperNodes", xlabel="round", ylabel="test accuracy")
    axes.legend()
    figure.savefig(picture)
    pyplot.close(figure)


def run_config(args: argparse.Namespace, algorithm: str, folder: Path) -> dict[str, Any]:
    return {
        "algorithm": algorithm,
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
