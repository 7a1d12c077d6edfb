"""The ledger's file: append-only lines of JSON, checksummed, locked, and on disk before the call returns."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from edpsgd.events import LedgerError, LedgerUnavailable


class LedgerFile:
    """Lines of JSON, each with a digest of itself and of all before it, appended and never rewritten."""

    def __init__(self, path: Path) -> None:
        self.path, self._place = path, path.absolute()
        self._process = os.getpid()
        is_new = not path.exists()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)
        try:
            _lock(descriptor, path)
            self.check()
            self.records, self._digest = read_records(path, is_locked=True)
        except LedgerError:
            self._file.close()
            raise
        if is_new:
            _sync_folder(path.parent)

    @property
    def is_own(self) -> bool:
        """Whether this process opened the file; a forked one must not write into it."""
        return self._process == os.getpid()

    def append(self, record: dict[str, Any], durable: bool) -> None:
        """Adds one line; if durable, returns only when it is on disk."""
        self.check()
        before, digest = self._digest, _chain(self._digest, record)
        line = json.dumps({**record, "digest": digest}).encode() + b"\n"
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            if durable:
                os.fsync(descriptor)
            self._digest = digest
        except BaseException as error:  # an interrupt too
            self._digest = before
            os.ftruncate(descriptor, size)  # no half line, so that the file stays readable
            if not isinstance(error, OSError):
                raise
            reason = f"the privacy ledger cannot be written, so the step was not released ({error.strerror})"
            raise OSError(error.errno, reason, str(self.path)) from error

    def check(self) -> None:
        """Refuses the file of another process, and one that was moved, deleted or replaced: entries would be lost."""
        if not self.is_own:
            raise LedgerUnavailable(f"{self.path} belongs to the process that this one was forked from")
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), self._place.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise LedgerUnavailable(f"{self.path} was moved, deleted or replaced while it is in use")

    def close(self) -> None:
        """Lets go of the file."""
        self._file.close()


def read_records(path: Path, is_locked: bool = False) -> tuple[list[dict[str, Any]], str]:
    """All entries, and the digest of the last. Unless the caller holds the lock, a run may be writing another one."""
    lines = path.read_bytes().split(b"\n")
    if lines[-1] and not is_locked and not _is_in_use(path):
        lines = path.read_bytes().split(b"\n")  # a run may have written its last line since
        is_locked = True
    if lines.pop() and is_locked:
        raise LedgerError(
            f"{path} ends in the middle of a line: it was cut, or the machine failed while writing. Nothing was "
            "changed. If only the end of the last line is missing, delete that line: its step never happened."
        )
    records, digest = [], ""
    for number, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = json.loads(line)
            written = record.pop("digest")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise LedgerError(f"{path}, line {number}: not a ledger entry. Nothing was changed.") from error
        digest = _chain(digest, record)
        if written != digest:
            raise LedgerError(f"{path}, line {number}: the checksum does not match. Nothing was changed.")
        records.append(record)
    return records, digest


def _chain(previous: str, record: dict[str, Any]) -> str:
    return hashlib.sha256((previous + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


def _lock(fd: int, path: Path, is_shared: bool = False) -> None:
    try:
        import fcntl
    except ImportError:  # a platform without advisory locks
        return
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(f"{path} is in use by another optimizer or process") from error


def _is_in_use(path: Path) -> bool:
    """Whether a run holds the lock."""
    with open(path, "rb") as file:
        try:
            _lock(file.fileno(), path, is_shared=True)
        except LedgerError:
            return True
    return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
