"""Where figures are kept, what they depend on, and how they are written: JSON for programs, Markdown for people."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from benchmarks.harness.rows.common import Machine, Made

RESULTS = Path(__file__).parents[1] / "results"
REDUCED = Path("runs/bench")
Found = dict[str, Any]  # a results file as it was read, whichever it is: rows has the forms
_PACKAGES = ("torch", "horovod", "transformers", "opacus", "dp-accounting", "numpy", "edpsgd")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The flag that all benchmarks share."""
    found = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the figures")
    return found


def reducible(name: str, description: str | None) -> argparse.ArgumentParser:
    """The same for benchmarks that have a small version, which shows that all of it works."""
    found = parser(name, description)
    found.add_argument("--reduced", action=_Reduced, nargs=0, default=False, help="a small version, into runs/bench")
    return found


class _Reduced(argparse.Action):
    """Keeps small figures and runs away from real ones, unless folders are named."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        namespace.reduced = True
        if namespace.out == RESULTS:
            namespace.out = REDUCED
        if hasattr(namespace, "runs") and namespace.runs == parser.get_default("runs"):
            namespace.runs = REDUCED / namespace.runs.name


def add_choice(parser: argparse.ArgumentParser, names: str) -> None:
    """For benchmarks that are made in pieces, called such names."""
    parser.add_argument("--only", default="", metavar="TEXT", help=f"only what has this in its name: {names}")
    parser.add_argument("--page", action="store_true", help="measure nothing, but write the page again")


def add_anew(parser: argparse.ArgumentParser) -> None:
    """For benchmarks of time, which differs each time."""
    parser.add_argument("--anew", action="store_true", help="measure again what the file of figures holds already")


def chosen(flags: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """What to do; a whole name chooses nothing but itself.

    Example:
        >>> chosen(argparse.Namespace(only="K = 1", page=False), ["K = 1", "K = 16"])
        ['K = 1']
    """
    if flags.page:
        return []
    known = list(names)
    found = [flags.only] if flags.only in known else [name for name in known if flags.only in name]
    if not found:
        raise SystemExit(f"--only {flags.only}: that is in no name of {'; '.join(known)}")
    return found


def command(name: str, flags: argparse.Namespace, needed: str = "") -> str:
    """That makes the figures, whatever else was said to it."""
    return f"python -m benchmarks.{name} {'--reduced' if getattr(flags, 'reduced', False) else needed}".rstrip()


def machine() -> Machine:
    """What figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    processor = ", ".join(sorted(names)) or platform.processor()
    versions = {package.replace("-", "_"): version(package) for package in _PACKAGES}
    found = {
        "processor": f"{processor} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
    }
    return cast(Machine, found)


def save(folder: Path, name: str, found: Mapping[str, Any], page: str) -> None:
    """Writes the figures and the page; a reader never sees half of one."""
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{name}.json", json.dumps(found, indent=1) + "\n")
    _replace(folder / f"{name}.md", page)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def load(name: str, folder: Path = RESULTS) -> Found:
    """The figures of a benchmark; benchmarks.harness.rows has their form."""
    return dict(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))


Piece = Mapping[str, Any]  # of a results file, whichever it is: rows has the forms
PieceForm = TypeVar("PieceForm", bound=Mapping[str, Any])


class Pieces:
    """A results file that grows piece by piece: each is written when it is there, and not measured again.

    Several processes and threads may work on one file, at different pieces.

    Args:
        folder: of the file.
        name: of the benchmark.
        figures: what follows from all pieces.
        page: makes the Markdown page of a results file, by its name and its figures.
        command: that makes all of them.
        anew: whether to measure again all that is there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     figures = lambda pieces: {"sum": sum(piece["n"] for piece in pieces.values())}
        ...     count = Pieces(Path(folder), "count", figures, lambda name, _: name, "count")
        ...     _ = count.get("a", lambda: {"n": 1}), count.get("b", lambda: {"n": 2}), count.get("a", lambda: 1 / 0)
        ...     load("count", Path(folder))["sum"]
        a: 0.0 minutes
        b: 0.0 minutes
        3
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        figures: Callable[[dict[str, Piece]], Mapping[str, Any]],
        page: Callable[[str, Found], str],
        command: str,
        anew: bool = False,
    ) -> None:
        self._folder, self._name, self._figures, self._page = folder, name, figures, page
        self._command, self._anew = command, anew
        self._own: dict[str, Piece] = {}
        self._lock = threading.Lock()

    def get(
        self,
        key: str,
        work: Callable[[], PieceForm],
        settings: Mapping[str, object] | None = None,
        again: bool = False,
    ) -> PieceForm:
        """What is known, or what ``work`` finds; with the machine and, unless it says so itself, the minutes it took.

        Args:
            key: of the piece.
            work: measures it.
            settings: what it hangs on; a piece with other ones is measured again.
            again: whether to measure what is known too.
        """
        known = self._own if self._anew else self._read()
        if key in known and known[key].get("settings") == _plain(settings) and not again:
            return cast(PieceForm, known[key])
        start = time.monotonic()
        found = dict(work())
        if settings is not None:
            found["settings"] = _plain(settings)
        minutes = (time.monotonic() - start) / 60
        self._own[key] = {"minutes": minutes, **found, "machine": machine()}
        self.write()
        print(f"{key}: {self._own[key]['minutes']:.1f} minutes", flush=True)
        return cast(PieceForm, self._own[key])

    def _read(self) -> dict[str, Piece]:
        return {**self._load().get("pieces", {}), **self._own}

    def _load(self) -> Found:
        return load(self._name, self._folder) if (self._folder / f"{self._name}.json").exists() else {}

    def write(self) -> None:
        """Writes all pieces, also those of other processes, and what follows from them; at least the pieces."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock, open(self._folder / f".{self._name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            pieces = self._read()
            whole = json.dumps({**self._load(), "pieces": pieces}, indent=1) + "\n"
            _replace(self._folder / f"{self._name}.json", whole)
            found = {**self._head(pieces), **self._figures(pieces), "pieces": pieces}
            save(self._folder, self._name, found, self._page(self._name, found))

    def _head(self, pieces: dict[str, Piece]) -> Made:
        machines = [piece["machine"] for piece in pieces.values()] or [machine()]
        minutes = sum(piece["minutes"] for piece in pieces.values())
        return {"command": self._command, "minutes": minutes, "machine": _together(machines)}


def missing(pieces: Mapping[str, Piece], wanted: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Names of pieces that are not there with the settings that they should have."""
    return [name for name, settings in wanted.items() if pieces.get(name, {}).get("settings") != _plain(settings)]


def merged(folder: Path, name: str, found: Mapping[str, Any], rows: str, key: Callable[[Any], Any]) -> Found:
    """New figures, with the rows of the file that are not among them: run folders may be on another machine.

    Args:
        folder: of the file.
        name: of the benchmark.
        found: the new figures.
        rows: under which name they have rows.
        key: what tells rows apart, and orders them.
    """
    known = load(name, folder) if (folder / f"{name}.json").exists() else {rows: []}
    new = {key(row) for row in found[rows]}
    kept = [row for row in known[rows] if key(row) not in new]
    machines = [known["machine"]] if kept else []
    machines += [found["machine"]] if found[rows] or not kept else []
    return {**found, rows: sorted([*found[rows], *kept], key=key), "machine": _together(machines)}


def _together(machines: Sequence[Mapping[str, object]]) -> Machine:
    """The values that all machines have, or their several values."""
    joined = {}
    for name in machines[-1]:
        joined[name] = _joined([machine[name] for machine in machines if name in machine])
    return cast(Machine, joined)


def _joined(values: Sequence[object]) -> object:
    if len(set(values)) == 1:
        return values[0]
    return ", ".join(dict.fromkeys(part for value in values for part in str(value).split(", ")))


def _plain(settings: Mapping[str, object] | None) -> Any:
    """As it will be read again."""
    return None if settings is None else json.loads(json.dumps(settings))
