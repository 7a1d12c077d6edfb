"""What a running job shows: a bar or lines on the terminal, metrics.jsonl and TensorBoard. Numbers only, never text."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

import edpsgd
from edpsgd import files
from edpsgd.ledger.guarantee import Bound, format_epsilon

METRICS = "metrics.jsonl"
_BETWEEN_LINES = 10.0  # seconds, where there is no terminal that a bar could move on


class Progress:
    """Of worker 0; the others' is silent.

    Args:
        folder: the run folder.
        total: steps of the whole training.
        done: steps that an earlier start has taken.
        is_shown: whether this is worker 0.
        tensorboard: whether to write TensorBoard scalars too.
        unit: what is counted, if it is not steps.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        done: int,
        is_shown: bool,
        tensorboard: bool,
        unit: str = "step",
    ) -> None:
        self._folder, self._is_shown, self._unit = folder, is_shown, unit
        self._total, self._done, self._done_at_start = total, done, done
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        if is_shown and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit=unit, dynamic_ncols=True)
        self._board: Any = None
        if is_shown and tensorboard:
            self._board = _open_board(folder / "tensorboard", done)

    def wants(self) -> bool:
        """Whether it is time to show something new; figures cost a synchronisation."""
        pause = 0.5 if self._bar is not None else _BETWEEN_LINES
        return self._is_shown and time.monotonic() - self._shown >= pause

    def move(self, steps: int = 1) -> None:
        """So many steps more."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)

    def show(self, text: str) -> None:
        """Figures beside the bar, or a line with the time left."""
        self._shown = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(text)
        elif self._is_shown:
            self.say(f"  {self._unit} {self._done}/{self._total}   {text}   {self._time_left()} left")

    def say(self, text: str = "") -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._is_shown:
            print(text, flush=True)

    def record(self, numbers: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, and scalars for TensorBoard."""
        if self._is_shown:
            record(self._folder, numbers)
        if self._board is not None:
            for name in numbers.keys() - {"step", "epoch"}:
                self._board.add_scalar(name, numbers[name], self._done)

    def close(self) -> None:
        """The end."""
        if self._bar is not None:
            self._bar.close()
        if self._board is not None:
            self._board.close()

    def _time_left(self) -> str:
        """The time that the steps left will need if they are as fast as those of this process."""
        steps_here = self._done - self._done_at_start
        if steps_here == 0:
            return "?"
        seconds_per_step = (time.monotonic() - self._started) / steps_here
        seconds = seconds_per_step * (self._total - self._done)
        return tqdm.format_interval(int(seconds))


class EpsilonSoFar:
    """ε of the steps so far as a text, asked often and computed as often as it costs little."""

    def __init__(self, optimizer: edpsgd.PrivateOptimizer, delta: float) -> None:
        self._optimizer, self._delta = optimizer, delta
        self._text, self._next = "", 0.0  # the last text, and when to compute another

    def __str__(self) -> str:
        begun = time.monotonic()
        if begun >= self._next:
            self._text = short(self._optimizer.epsilon(self._delta))
            ended = time.monotonic()
            self._next = ended + 50 * (ended - begun)  # so that it takes 2 % of the time
        return self._text


def short(bound: Bound) -> str:
    """ε for a line of figures; a * says that it has conditions, which plan and card tell.

    Example:
        >>> short(Bound(2.0, 1e-5, "exact Gaussian", "replace or blank one example", ("nobody knows the seed",)))
        '2.000*'
    """
    star = "*" if bound.conditions else ""
    return f"{format_epsilon(bound.epsilon)}{star}"


def record(folder: Path, numbers: Mapping[str, Any]) -> None:
    """Appends a line to the metrics of a run; it is on the disk when this returns. JSON has no NaN: that is null."""
    json_numbers = {}
    for name, value in numbers.items():
        json_numbers[name] = value if math.isfinite(value) else None
    files.append_line(folder / METRICS, json.dumps(json_numbers))


def drop_later_lines(folder: Path, step: int) -> None:
    """Removes the metrics of what a run that goes on from a checkpoint will do again.

    The last test is among it.
    """
    file = folder / METRICS
    if not file.exists():
        return
    lines = files.read_text(file, files.LARGE).splitlines()
    kept = [line for line in lines if _step_of(line) <= step]
    files.write_text(file, "".join(f"{line}\n" for line in kept))


def last_step(folder: Path) -> int:
    """The last step that the metrics of a run tell of; 0 if there are none."""
    file = folder / METRICS
    if not file.exists():
        return 0
    lines = files.read_text(file, files.LARGE).splitlines()
    steps = [_step_in(line) for line in lines]
    return max((int(step) for step in steps if math.isfinite(step)), default=0)


def _step_of(line: str) -> float:
    """The step after which a line was written; infinity for the last test and for no step."""
    return math.inf if '"test_' in line else _step_in(line)


def _step_in(line: str) -> float:
    """The step that a line names; infinity if the line is no JSON or names none."""
    try:
        return float(files.parse_json(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError):  # cut off by a crash
        return math.inf


def _open_board(folder: Path, done: int) -> Any:
    """The TensorBoard writer of a run; scalars of steps that will run again are dropped."""
    from torch.utils.tensorboard import SummaryWriter

    purge_step = done + 1 if done else None
    return SummaryWriter(str(folder), purge_step=purge_step)
