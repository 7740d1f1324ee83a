"""Kill, stop and restart the nodes of a real federation; each round must be the one computed here.

    make chaos CHAOS='--minutes 30'
    python tools/chaos.py --minutes 6 --seed 7

A SuperLink and five SuperNodes over TLS on 127.0.0.1 train with `FedExP(bound=3, checkpoint=...)`
(the app of tests/flower/deploy). At random moments that the seed decides, a node is killed with all
of its processes (SIGKILL) and started again after a while, stopped for a while (SIGSTOP, SIGCONT),
or restarted (SIGTERM); at most two at a time. The last node is an attacker, which by turns replies
an update times 1e6, NaN, negative variances and a reversed update times 10.

The app writes the replies of each round, which of them were accepted, and the model before and
after it. After every round:

- the model is the one that numpy computes from the accepted replies in float64, within 1e-6 (of
  its largest value, where that is more than 1);
- the round started from the model of the round before;
- accepted is every reply that is finite and has no negative variances, and no other;
- the log names every node whose reply was refused or is missing;
- the run has not ended, nor has a node by itself.

Everything is on loopback, with free ports, and ends with this process, also on Ctrl-C. Linux only.
A campaign appends one line to benchmarks/records/chaos.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "flower_app"))

from local_federation import USER, LocalFederation  # noqa: E402

APP = ROOT / "tests" / "flower" / "deploy" / "app"
RECORD = ROOT / "benchmarks" / "records" / "chaos.jsonl"
NODES, ATTACKER, BOUND = 5, 4, 3.0
ATTACKS = ("huge", "nan", "variances", "reversed")
EVENTS = {"kill": "start", "stop": "continue", "restart": ""}  # and what ends them
MOST_DOWN = 2  # nodes at a time
MOST_FAILURES = 10
PER_OCTAVE = 16  # bins of norms per factor of two, of which a median is the upper end
START_SECONDS, LOG_SECONDS = 180.0, 15.0  # for the first round; for the log of a round

Arrays = Mapping[str, NDArray[Any]]


class Event(NamedTuple):
    """What happens to a node, at a moment in seconds."""

    moment: float
    action: str
    node: int


def plan(seed: int, seconds: float, gap: float = 20.0) -> list[Event]:
    """Return the events of a campaign in order; what is killed or stopped comes back."""
    rng, moment, events = random.Random(seed), 0.0, list[Event]()
    back = [0.0] * NODES
    while (moment := moment + rng.expovariate(1 / gap)) < seconds:
        action, pause = rng.choice([*EVENTS]), rng.uniform(2, 3 * gap)
        (node,) = rng.choices(range(NODES), [3, 3, 3, 3, 1])  # the attacker is mostly there
        down = sum(until > moment for until in back)
        if back[node] > moment or down == MOST_DOWN:
            continue
        events.append(Event(moment, action, node))
        if EVENTS[action]:
            back[node] = moment + pause
            events.append(Event(back[node], EVENTS[action], node))
    return sorted(events)


def is_usable(reply: Arrays) -> bool:
    """Return whether a reply may be used: finite, and no negative variances."""
    variances = [value for name, value in reply.items() if name.endswith("running_var")]
    finite = all(np.isfinite(value).all() for value in reply.values())
    return finite and all((value >= 0).all() for value in variances)


def lower_median(norms: NDArray[Any]) -> float:
    """Return the upper end of the bin of the lower median."""
    norm = np.sort(norms)[(len(norms) - 1) // 2]
    place = -64.0 * PER_OCTAVE if norm == 0 else np.floor(np.log2(norm) * PER_OCTAVE)
    return float(2 ** ((place + 1) / PER_OCTAVE))


def expected_model(
    start: Arrays, replies: Sequence[Arrays], weights: Sequence[float], medians: Mapping[str, float]
) -> tuple[dict[str, NDArray[Any]], dict[str, float], int]:
    """Return the model after a round, the medians for the next one, and how many were clipped.

    Args:
        start: the model before the round.
        replies: the accepted ones.
        weights: of the same clients.
        medians: of the round before; none before the first.
    """
    buffers = [name for name in start if "running_" in name]
    params = [n for n, value in start.items() if value.dtype.kind == "f" and n not in buffers]
    if not replies:
        return dict(start), dict(medians), 0

    def rows(names: list[str]) -> NDArray[Any]:
        changes = [[(r[n].astype(float) - start[n]).ravel() for n in names] for r in replies]
        return np.array([np.concatenate(parts) for parts in changes])

    values = {
        "update": rows(params),
        "buffers": rows(buffers),
        "weight": np.array(weights)[:, None],
    }
    norms = {name: np.linalg.norm(value, axis=1) for name, value in values.items()}
    after = {name: lower_median(lengths) for name, lengths in norms.items()}
    if medians:  # they change by a factor of two at most
        after = {n: float(np.clip(m, medians[n] / 2, 2 * medians[n])) for n, m in after.items()}
    used, clipped = medians or after, np.zeros(len(replies), bool)
    heavy = np.clip(np.array(weights) / used["weight"], 1.0, BOUND)  # than the median client
    for name, lengths in norms.items():
        limit = BOUND * used[name] / (1.0 if name == "weight" else heavy)
        clipped |= lengths > limit
        values[name] = values[name] * np.minimum(1.0, limit / np.maximum(lengths, 1e-300))[:, None]
    share = values["weight"] / values["weight"].sum()
    mean, mean_sq = (share * values["update"]).sum(0), (share * values["update"] ** 2).sum()
    step = max(1.0, mean_sq / (2 * (mean @ mean + 0.05 * mean_sq))) if mean_sq else 1.0
    model = dict(start)
    for names, change in ((params, step * mean), (buffers, (share * values["buffers"]).sum(0))):
        ends = np.cumsum([start[name].size for name in names])[:-1]
        for name, part in zip(names, np.split(change, ends), strict=True):
            model[name] = start[name] + part.reshape(start[name].shape)
    return model, after, int(clipped.sum())


def named_in_log(log: str) -> Counter[int]:
    """Return how many replies of each node the log says are left out.

    >>> named_in_log("WARNING: node 7 is left out of this round: it did not answer within 9 s")
    Counter({7: 1})
    """
    parts = [part.rsplit(" ", 1)[-1] for part in log.split(" is left out of this round")[:-1]]
    return Counter(int(part) for part in parts if part.isdigit())


@dataclass
class Check:
    """The rounds that are checked so far: their number, counts, and what was wrong."""

    rounds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    left_out: Counter[int] = field(default_factory=Counter)
    medians: dict[str, float] = field(default_factory=dict)
    model: dict[str, NDArray[Any]] = field(default_factory=dict)

    def fail(self, text: str) -> None:
        self.failures.append(f"round {self.rounds}: {text}")
        print("FAILED", self.failures[-1], flush=True)

    def add(self, stored: Arrays) -> None:
        """Check the next round."""
        self.rounds += 1

        def arrays(prefix: str) -> dict[str, NDArray[Any]]:
            named = {name.partition("/"): value for name, value in stored.items()}
            return {name: value for (first, _, name), value in named.items() if first == prefix}

        start, nodes, accepted = arrays("start"), stored["nodes"].tolist(), stored["accepted"]
        replies = [arrays(str(k)) for k in range(len(nodes))]
        for k, reply in enumerate(replies):
            if accepted[k] != bool(reply and is_usable(reply)):
                self.fail(f"the reply of node {nodes[k]} is accepted: {bool(accepted[k])}")
        if any(not np.array_equal(value, start[name]) for name, value in self.model.items()):
            self.fail("it does not start from the model of the round before")
        good = np.flatnonzero(accepted)
        used, weights = [replies[k] for k in good], stored["weights"][good].tolist()
        wanted, self.medians, clipped = expected_model(start, used, weights, self.medians)
        self.model = arrays("model")
        off = max(float(np.abs(self.model[n] - value).max()) for n, value in wanted.items())
        scale = max(1.0, *(float(np.abs(value).max()) for value in wanted.values()))
        if not off <= 1e-6 * scale:
            self.fail(f"the model is off by {off:.1e} where values are up to {scale:.1e}")
        unanswered = replies.count({})
        refused = len(nodes) - len(good) - unanswered
        self.left_out.update(n for n, is_used in zip(nodes, accepted, strict=True) if not is_used)
        self.counts.update(refused=refused, unanswered=unanswered, clipped=clipped)
        text = (
            f"round {self.rounds}: {len(good)} accepted, {refused} refused, {unanswered} without "
        )
        print(f"{text}answer, {clipped} clipped, off by {off:.1e}", flush=True)

    def check_log(self, federation: LocalFederation) -> None:
        """Wait until the log names all that was left out, which reaches it a little later."""
        deadline = time.monotonic() + LOG_SECONDS
        while missing := self.left_out - named_in_log(federation.processes.log(USER)):
            if time.monotonic() > deadline:
                self.left_out -= missing
                self.fail(f"the log does not name {dict(missing)}")
            time.sleep(0.2)


def act(federation: LocalFederation, event: Event) -> bool:
    """Do to a node what the plan says; return whether it was as the plan left it."""
    name, processes = f"node-{event.node}", federation.processes
    pids = list(processes.family(name))
    signals = {"stop": signal.SIGSTOP, "continue": signal.SIGCONT, "restart": signal.SIGTERM}
    for pid in pids if event.action in signals else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signals[event.action])
    if event.action == "restart":
        time.sleep(2.0)  # to end in order
    if event.action in ("kill", "restart"):
        processes.kill(name)
    if event.action in ("start", "restart"):
        federation.start_node(event.node)
    return bool(pids) != (event.action == "start")


def campaign(folder: Path, seconds: float, seed: int, timeout: float) -> Check:
    """Run a federation for so long; return what was checked and counted."""
    check, audit = Check(), folder / "audit"
    most = int(seconds / 2) + 1  # rounds: each takes several seconds
    faults = [f"{n}:{ATTACKER}:{ATTACKS[(n - 1) % 4]}" for n in range(1, most + 1)]
    config = {"audit": str(audit), "checkpoint": str(folder / "stored"), "faults": " ".join(faults)}
    with LocalFederation(folder, nodes=NODES) as federation:
        rounds = {"rounds": most, "timeout": timeout, "min-nodes": 2}
        stream = federation.submit(APP, {**config, **rounds})
        began, events = time.monotonic(), plan(seed, seconds)
        while (now := time.monotonic() - began) < seconds and len(check.failures) < MOST_FAILURES:
            while events and events[0].moment <= now:
                event = events.pop(0)
                print(f"{now:6.0f} s: {event.action} node {event.node}", flush=True)
                if not act(federation, event):
                    check.fail(f"node {event.node} had ended by itself")
                check.counts[event.action] += 1
            path = audit / f"round-{check.rounds + 1}.npz"
            if path.exists():
                with np.load(path) as stored:
                    check.add(dict(stored))
                path.unlink()
                check.check_log(federation)
            if stream.poll() is not None or (now > START_SECONDS and not check.rounds):
                break
            time.sleep(0.2)
        if (status := federation.last_status()) != "running" or not check.rounds:
            check.fail(f"the run is {status}")
    return check


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, metavar="N", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="(the time)")
    parser.add_argument("--timeout", type=float, default=30.0, help="of a round (%(default)s s)")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="PATH")
    args = parser.parse_args()
    for ending in (signal.SIGINT, signal.SIGTERM):  # also in the background, where it is ignored
        signal.signal(ending, signal.default_int_handler)
    commit = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"logs and models, removed where all is well: {folder}", flush=True)
    check = campaign(folder, 60 * args.minutes, args.seed, args.timeout)
    line = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "minutes": args.minutes,
        "seed": args.seed,
        "rounds": check.rounds,
        **{f"{name}s": check.counts[name] for name in EVENTS},
        **{name: check.counts[name] for name in ("refused", "unanswered", "clipped")},
        "failures": len(check.failures),
        "flwr": version("flwr"),
        "commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(),
    }
    with args.record.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    if not check.failures:
        shutil.rmtree(folder)
    return len(check.failures) > 0


if __name__ == "__main__":
    sys.exit(main())
