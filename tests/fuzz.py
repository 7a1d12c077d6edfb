"""Random networks against a loop of plain autograd, for as long as one likes.

    python -m tests.fuzz --networks 10000 --seed 0 --processes 2
    python -m tests.fuzz --only 123            one network, with all that is to be said of it
    python -m tests.fuzz --only 123 --shrink   the smallest part of it that fails in the same way

It may be stopped at any time, and goes on where it stopped while the code is the same.

A seed repeats the network, its batches, and what the engine draws by chance. It does not repeat what an engine makes
of memory addresses, such as the order of a set of nodes: where a network fails in some runs only, ``--only 123 --times
20`` says in how many.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.helpers.networks.network import KINDS, make_plan
from tests.helpers.networks.trial import VERDICTS, Outcome, run, shrunk
from tests.helpers.paths import ROOT

_LONGEST = 120  # seconds for a network: more is a crash


def digest() -> str:
    """Of the engine and of the generator."""
    files = [*(ROOT / "edpsgd").rglob("*.py"), *(ROOT / "tests" / "helpers" / "networks").glob("*.py")]
    found = hashlib.sha256()
    for path in sorted(files):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def described(seed: int) -> dict[str, Any]:
    """What became of one network."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {_LONGEST} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_LONGEST)
    plan = make_plan(seed)
    try:
        outcome = run(plan)
    except Exception as error:  # before the engine's turn: the generator is wrong, or torch
        outcome = Outcome(plan, broken=f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    return {
        "seed": seed,
        "verdict": outcome.verdict,
        "kinds": outcome.plan.kinds,
        "batches": outcome.batches,
        "wrong": len(outcome.wrong),
        "farthest": outcome.farthest,
        "slow": sorted(outcome.slow),
        "text": "" if outcome.verdict == "right" else f"{outcome}\n",
    }


class Counts:
    """Adds up what became of networks."""

    def __init__(self) -> None:
        self.verdicts, self.slow, self.kinds = Counter[str](), Counter[str](), Counter[str]()
        self.failing = Counter[str]()
        self.batches = self.wrong = self.networks = self.with_slow = 0
        self.farthest = 0.0

    def add(self, one: dict[str, Any]) -> None:
        self.networks += 1
        self.verdicts[one["verdict"]] += 1
        self.batches += one["batches"]
        self.wrong += one["wrong"]
        self.with_slow += bool(one["slow"])
        self.slow.update(one["slow"])
        self.kinds.update(set(one["kinds"]))
        if one["verdict"] != "right":
            self.failing.update(set(one["kinds"]))
        self.farthest = max(self.farthest, one["farthest"])

    def line(self) -> str:
        wrong, stopped, crashed, broken = (self.verdicts[name] for name in VERDICTS[1:])
        return (
            f"{self.networks} networks, {self.batches} batches: {self.wrong} wrong batches in {wrong} networks "
            f"(moved by {self.farthest:.3g} C at most), {stopped} stopped sound runs, {crashed} crashes, "
            f"{self.with_slow} with slow parts" + (f", {broken} BROKEN" if broken else "")
        )

    def tables(self) -> str:
        """Kinds of operations: share of the networks, how often slow, and in failing networks."""
        lines = ["", "kind of operation: networks, of which failing, computed unit by unit"]
        for kind in sorted(self.kinds, key=lambda kind: -self.failing[kind] / self.kinds[kind]):
            share = 100 * self.kinds[kind] / self.networks
            failing, slow = self.failing[kind], self.slow[kind]
            lines.append(f"  {kind}: {self.kinds[kind]} ({share:.1f} %), {failing}, {slow}")
        return "\n".join(lines)


def many(seeds: range, processes: int, record: Path) -> Counts:
    """All networks that are not in the record yet; those that are count too."""
    known = [one for one in _recorded(record) if one["seed"] in seeds]
    left = sorted(set(seeds) - {one["seed"] for one in known})
    counts, begun = Counts(), time.monotonic()
    for one in known:
        counts.add(one)
        print(one["text"], end="")
    with record.open("a") as file:
        for done, one in enumerate(_results(left, processes), 1):
            file.write(json.dumps(one) + "\n")
            file.flush()
            counts.add(one)
            print(one["text"], end="")
            if done % 100 == 0 or done == len(left):
                print(f"{counts.line()}; {done / (time.monotonic() - begun):.1f} networks/s", flush=True)
    if not left:
        print(counts.line())
    return counts


def _recorded(record: Path) -> list[dict[str, Any]]:
    """What is complete in the record; a line that was cut off is taken out of it."""
    record.parent.mkdir(parents=True, exist_ok=True)
    lines = record.read_text().splitlines(keepends=True) if record.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        record.write_text("".join(whole))
    return [json.loads(line) for line in whole]


def _results(seeds: Sequence[int], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1:
        yield from map(described, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(described, seeds, chunksize=4)


def _alone(seed: int, times: int, is_shrunk: bool) -> bool:
    """Prints what becomes of one network; whether it was right each time."""
    outcomes = [run(make_plan(seed)) for _ in range(times)]
    failed = next((one for one in outcomes if one.verdict != "right"), None)
    print(failed or outcomes[0])
    verdicts = Counter(one.verdict for one in outcomes)
    print(", ".join(f"{verdict}: {count} of {times}" for verdict, count in verdicts.most_common()))
    if is_shrunk and failed is not None:
        print(f"shrunk:\n{shrunk(failed)}")
    return failed is None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, metavar="SEED", help="run a single network")
    parser.add_argument("--shrink", action="store_true", help="with --only: leave out what need not be there")
    parser.add_argument("--times", type=int, default=1, help="with --only: how often")
    parser.add_argument("--record", type=Path, help="what is done; runs/fuzz/<digest of the code>.jsonl")
    parser.add_argument("--kinds", action="store_true", help="list the kinds of operations and stop")
    args = parser.parse_args(arguments)
    if min(args.networks, args.processes, args.times) < 1:
        parser.error("--networks, --processes and --times must be at least 1")
    if args.kinds:
        print("\n".join(KINDS))
        return 0
    if args.only is not None:
        return int(not _alone(args.only, args.times, args.shrink))
    record = args.record or ROOT / "runs" / "fuzz" / f"{digest()}.jsonl"
    counts = many(range(args.seed, args.seed + args.networks), args.processes, record)
    print(counts.tables())
    return int(counts.verdicts["right"] < counts.networks)


if __name__ == "__main__":
    raise SystemExit(main())
