"""The ledger's file: append-only lines of JSON, checksummed, locked, and on disk before the call returns."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from edpsgd import files
from edpsgd.ledger.events import LedgerError, LedgerUnavailable

LARGEST = 4 * files.LARGE  # bytes of a ledger; a line for every 32 steps makes some megabytes
LONGEST = files.LIMIT  # of a line; the longest holds a checkpoint's ledger, 150 bytes an event


class LedgerFile:
    """Lines of JSON, each with a digest of itself and of all before it, appended and never rewritten.

    Making one opens the file, locks it and reads what it holds.

    Attributes:
        path: where it is, as it was given.
        records: what it held when it was opened, one for each line.
        was_emptied: whether it was there and held nothing: no run leaves such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._absolute_path = path.absolute()  # the working folder may change
        self._process = os.getpid()
        is_new = not path.exists()
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 (open as long as the run)
        try:
            _lock(descriptor, path)
            self._size = os.fstat(descriptor).st_size
            self.check()
            self.records, self._digest = read_records(path, is_locked=True)
            files.sync(path.parent)  # also if it is not new: whoever made it may have come no further
        except BaseException:
            self._file.close()
            raise
        self.was_emptied = not is_new and self._size == 0

    @property
    def is_own(self) -> bool:
        """Whether this process opened the file; a forked one must not write into it."""
        return self._process == os.getpid()

    def append(self, record: dict[str, Any], durable: bool) -> None:
        """Adds one line; if durable, returns only when it is on disk.

        Raises:
            LedgerUnavailable: if the file is not this process's any more, was changed by others, or is full.
            OSError: if the line cannot be written; the file is then as it was before.
        """
        self.check()
        digest_before, size_before = self._digest, self._size
        digest = _chain(digest_before, record)
        line = json.dumps({**record, "digest": digest}).encode() + b"\n"
        size_after = size_before + len(line)
        if len(line) > LONGEST or size_after > LARGEST:
            raise LedgerUnavailable(f"{self.path} would be too large to be read again: use a new ledger")
        descriptor = self._file.fileno()
        try:
            while line:
                line = line[os.write(descriptor, line) :]
            if durable:
                os.fsync(descriptor)
            self._digest, self._size = digest, size_after
        except BaseException as error:  # an interrupt too
            self._digest, self._size = digest_before, size_before
            os.ftruncate(descriptor, size_before)  # no half line, so that the file stays readable
            if not isinstance(error, OSError):
                raise
            reason = f"the privacy ledger cannot be written, so the step was not released ({error.strerror})"
            raise OSError(error.errno, reason, str(self.path)) from error

    def check(self) -> None:
        """Refuses the file of another process, and one that was moved, replaced or cut: entries would be lost."""
        if not self.is_own:
            raise LedgerUnavailable(f"{self.path} belongs to the process that this one was forked from")
        try:
            mine = os.fstat(self._file.fileno())
            is_there = os.path.samestat(mine, self._absolute_path.stat())
        except OSError:
            is_there = False
        if not is_there:
            raise LedgerUnavailable(f"{self.path} was moved, deleted or replaced while it is in use")
        if mine.st_size != self._size:
            raise LedgerUnavailable(
                f"{self.path} was changed while it is in use: it has {mine.st_size} bytes, and this run left "
                f"{self._size}. What it held is in the ledger of the last checkpoint, and in memory"
            )

    def close(self) -> None:
        """Closes the file and gives up its lock."""
        self._file.close()


def read_records(path: Path, is_locked: bool = False) -> tuple[list[dict[str, Any]], str]:
    """All entries of a file in order, without their digests, and the digest of the last.

    Args:
        path: of the ledger.
        is_locked: whether the caller holds the lock; else a run may be writing another line meanwhile.

    Raises:
        LedgerError: if the file was cut, changed, or is no ledger.
    """
    lines, rest = _read_lines(path)
    if rest and not is_locked and not _is_in_use(path):
        lines, rest = _read_lines(path)  # a run may have written its last line since
        is_locked = True
    if rest and is_locked:
        raise LedgerError(
            f"{path} ends in the middle of a line: it was cut, or the machine failed while writing. Nothing was "
            "changed. If only the end of the last line is missing, delete that line: its step never happened."
        )
    records, digest = [], ""
    for number, line in enumerate(lines, 1):
        try:
            record: dict[str, Any] = files.parse_json(line)
            written = record.pop("digest")
            digest = _chain(digest, record)
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise LedgerError(f"{path}, line {number}: not a ledger entry. Nothing was changed.") from error
        if written != digest:
            raise LedgerError(f"{path}, line {number}: the checksum does not match. Nothing was changed.")
        records.append(record)
    return records, digest


def _read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Whole lines with their ends, and what comes after the last of them."""
    with open(_opened(path, os.O_RDONLY), "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise LedgerError(f"{path} is larger than any ledger ({LARGEST // files.MEBIBYTE} MiB)")
        try:
            lines = list(files.lines(file, LONGEST))
        except files.LongLine as error:
            raise LedgerError(f"{path}, line {error.number}: not a ledger entry, too long.") from None
    rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    return lines, rest


def _opened(path: Path, flags: int) -> int:
    """A descriptor of the file; a LedgerError if it is no regular one."""
    try:
        return files.open_regular(path, flags)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR):
            raise LedgerError(f"{path} must be a regular file, and is none") from None
        raise


def _chain(previous: str, record: dict[str, Any]) -> str:
    """The digest of a line, which depends on all lines before it: 16 hexadecimal digits."""
    return hashlib.sha256((previous + json.dumps(record, sort_keys=True)).encode()).hexdigest()[:16]


def _lock(descriptor: int, path: Path, is_shared: bool = False) -> None:
    """Locks the file, for one writer or, shared, against writers; a LedgerError if another process has it."""
    try:
        import fcntl
    except ImportError:  # a platform without advisory locks
        return
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        raise LedgerError(f"{path} is in use by another optimizer or process") from error


def _is_in_use(path: Path) -> bool:
    """Whether a run holds the lock."""
    with files.open_bytes(path) as file:
        try:
            _lock(file.fileno(), path, is_shared=True)
        except LedgerError:
            return True
    return False
