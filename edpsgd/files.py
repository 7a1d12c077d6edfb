"""Files that may be hostile or damaged: regular ones only, read within bounds, written for their owner alone.

What is written replaces the old file or folder in one step, and is on disk before that: after a crash there is the old
one or the new one, whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

MEBIBYTE = 2**20
LIMIT = 16 * MEBIBYTE  # of a file of settings, and of a line
LARGE = 64 * MEBIBYTE  # of a list of words, or of a checkpoint's state

AnyPath = str | os.PathLike[str]


def open_regular(path: AnyPath, flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of a regular file; anything else is an OSError, also a FIFO on which open() would wait for ever."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a FIFO that nobody reads
            raise _no_file(path) from None
        raise
    try:
        _check_regular(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_bytes(path: AnyPath) -> BinaryIO:
    """A regular file, open for reading bytes; anything else is an OSError."""
    return open(open_regular(path), "rb")


def check_tree(folder: AnyPath) -> None:
    """Refuses a folder in which anything is neither a folder nor a regular file: other libraries would wait for it."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                path = os.path.join(place, name)
                _check_regular(os.stat(path).st_mode, path)


def _check_regular(mode: int, path: AnyPath) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise _no_file(path)


def _no_file(path: AnyPath) -> OSError:
    return OSError(errno.EINVAL, "it is no regular file", str(path))


# -------------------------------------------------------------------- reading


def read_bytes(path: AnyPath, limit: int = LIMIT) -> bytes:
    """All of a file; one that is larger than the limit is an OSError."""
    with open_bytes(path) as file:
        is_large = os.fstat(file.fileno()).st_size > limit
        content = b"" if is_large else file.read(limit + 1)  # it may grow meanwhile
    if is_large or len(content) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit / MEBIBYTE:g} MiB", str(path))
    return content


def read_text(path: AnyPath, limit: int = LIMIT) -> str:
    """All of a file as text in UTF-8; ends of lines are as they are, and a file beyond the limit is an OSError."""
    return read_bytes(path, limit).decode()


def read_json(path: AnyPath, limit: int = LIMIT) -> Any:
    """The JSON of a file; what is no JSON, or nested too deep, is a ValueError."""
    return parse_json(read_bytes(path, limit))


def parse_json(text: str | bytes) -> Any:
    """The JSON of a text; what is no JSON, or nested too deep, is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deep") from None


def lines(file: IO[bytes], longest: int = LIMIT) -> Iterator[bytes]:
    """The lines of a file with their ends. A longer one is a ValueError, and no more than that is read of it."""
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) > longest:
            raise LongLine(number, longest)
        yield line


class LongLine(ValueError):
    """A line that no sensible file has."""

    def __init__(self, number: int, longest: int) -> None:
        super().__init__(f"line {number} is longer than {longest} bytes")
        self.number = number


# -------------------------------------------------------------------- writing


def write_text(path: AnyPath, text: str) -> None:
    """Replaces the text of a file, or makes it: whoever reads it finds the old text or the new one, whole.

    Only the owner can read the file.
    """
    path = Path(path)
    # The name is unlike any other: several processes may write the same file.
    with replaced_file(path, path.with_name(f".{path.name}.{uuid.uuid4().hex}")) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)


@contextlib.contextmanager
def replaced_file(path: Path, temporary: Path) -> Iterator[Path]:
    """What the block writes into the temporary file takes the place of ``path`` afterwards, whole and on disk.

    If the block fails, the old file stays as it was, and the temporary one is removed.

    Args:
        path: the file to replace, or to make.
        temporary: a name in the same folder; a file that a killed process left there is removed first.
    """
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.chmod(0o600)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replaced_folder(path: Path, temporary: Path) -> Iterator[Path]:
    """The folder that the block fills is called ``path`` afterwards, and is on disk with its new name.

    If anything fails, the temporary folder is removed. The files in it are the block's to put on disk.

    Args:
        path: a name that no other folder has.
        temporary: a name beside it; a folder that a killed process left there is removed first.
    """
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def sync(path: AnyPath) -> None:
    """Returns when a file, or the names in a folder, are on disk, and not only with the operating system."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: AnyPath, text: str) -> None:
    """Adds a line, which is on disk when this returns; only the owner can read the file."""
    with open_to_append(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def open_to_append(path: AnyPath) -> TextIO:
    """A file to add lines to, which is made for its owner alone if there is none."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return open(descriptor, "a", encoding="utf-8", newline="\n")


def make_private(folder: AnyPath, with_content: bool = False) -> None:
    """Makes a folder for its owner alone, or takes an existing one away from all others.

    Args:
        folder: a path.
        with_content: all that is in it too; for a folder that is known to hold a run and nothing else.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & stat.S_ISVTX:
        raise OSError(errno.EPERM, "it is a folder for everybody: name one inside it", str(folder))
    _restrict(folder, 0o700)
    if with_content:
        for place, folders, names in os.walk(folder):
            for name in folders + names:
                path = Path(place, name)
                if not path.is_symlink():
                    _restrict(path, 0o700 if path.is_dir() else 0o600)


def _restrict(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


@contextlib.contextmanager
def private() -> Iterator[None]:
    """Whatever is made meanwhile, by any library, is for its owner alone. Also a decorator."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
