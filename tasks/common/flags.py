"""Settings as a frozen dataclass: defaults in it, a YAML or TOML file over them, flags over both."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from edpsgd import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


_LARGEST = 2**16  # bytes of a configuration
_DEEPEST = 4  # collections in each other, of which a configuration has one
_LONGEST_VALUE = 4096  # characters: a path at most


def setting(default: Any, text: str, choices: Sequence[str] = (), group: str = "") -> Any:
    """A dataclass field: its default, what it means, what it may be, and its group in the help.

    Those of the group "machine" change speed and place only, and may differ when a run goes on.
    """
    return field(default=default, metadata={"help": text, "choices": choices, "group": group})


@dataclass(frozen=True)
class Settings:
    """What the settings of all jobs can do; a job has a subclass with its fields."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for item in fields(self):
            _check_type(item, getattr(self, item.name), hints[item.name])

    def given(self) -> dict[str, Any]:
        """All settings, as a configuration file has them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def check(self, names: Sequence[str], wanted: str, fits: Any) -> None:
        """Refuses values that do not fit; None does."""
        for name in names:
            value = getattr(self, name)
            require(value is None or fits(value), name, value, wanted)


Kind = TypeVar("Kind", bound=Settings)


def parse(
    kind: type[Kind], parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> tuple[Kind, argparse.Namespace]:
    """The settings of a command line; and what it says beside them: config, resume, dry_run.

    Beside these, ``given`` has the names of all settings that a flag or the configuration file names.
    """
    _add_flags(kind, parser)
    flags = parser.parse_args(arguments)
    given = {}
    for item in fields(kind):
        value = getattr(flags, item.name)
        if value is not None:  # no flag has a default of its own: None was not given
            given[item.name] = value
    try:
        settings = read_file(kind, flags.config) if flags.config else {}
        settings.update(given)  # flags go before the file
        flags.given = frozenset(settings)
        if flags.resume is not None:
            return _resumed(kind, Path(flags.resume), settings), flags
        return kind(**settings), flags
    except ValueError as error:
        parser.error(str(error))


def read_file(kind: type[Settings], path: str | Path) -> dict[str, Any]:
    """Settings of a YAML or TOML file; names as in flags, with - or _.

    Returns:
        Values by the names of the fields. Whether a value fits its field is checked when the
        settings are made of them.
    """
    path = Path(path)
    content = _read_content(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"the configuration {path} must be names and values")
    hints = get_type_hints(kind)
    settings: dict[str, Any] = {}
    for written_name, value in content.items():
        name = str(written_name).replace("-", "_")
        if name not in hints:
            raise ValueError(f"the configuration {path} has the unknown setting {written_name!r}")
        if isinstance(value, Mapping | list):
            raise ValueError(f"the configuration {path} has more than one value for {name}")
        settings[name] = interpreted(value, hints[name])
    return settings


def _read_content(path: Path) -> Any:
    """What the file holds, whatever that is; errors never quote its text, which may be private."""
    is_toml = path.suffix == ".toml"
    try:
        text = files.read_text(path, _LARGEST)
        return tomllib.loads(text) if is_toml else load_yaml(text)
    except OSError as error:
        raise ValueError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = "" if place is None else f", line {place.line + 1}"
        form = "TOML" if is_toml else "YAML"
        raise ValueError(f"the configuration {path} is no {form}{where}") from None


def load_yaml(text: str) -> Any:
    """The content of a YAML text that is as flat as settings are.

    Nesting and aliases, which can stand for more than any memory holds, are refused before
    anything is made of the text.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        is_long = isinstance(event, yaml.ScalarEvent) and len(event.value) > _LONGEST_VALUE
        if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST or is_long:
            raise yaml.MarkedYAMLError(problem_mark=event.start_mark)
    return yaml.safe_load(text)


def interpreted(value: Any, hint: Any) -> Any:
    """The value that was meant: YAML reads a bare off as False, and 1e-3 as a text."""
    if value is False and hint is str:
        return "off"
    wants_number = float in (hint, *get_args(hint))
    if not (isinstance(value, str) and wants_number):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def write_file(path: Path, config: Settings) -> None:
    """The configuration as YAML, which read_file reads; the file is whole or not there."""
    files.write_text(path, yaml.safe_dump(config.given(), sort_keys=False, allow_unicode=True))


def _resumed(kind: type[Kind], folder: Path, given: Mapping[str, Any]) -> Kind:
    """A run goes on with its own settings; only those of the machine may change."""
    own = {**read_file(kind, folder / "config.yaml"), "output": str(folder)}
    config = kind(**own)
    machine = {item.name for item in fields(kind) if item.metadata["group"] == "machine"}
    changed, fixed = {}, []
    for name, value in given.items():
        if name in machine and name != "output":
            changed[name] = value
            continue
        wanted = str(Path(value)) if name == "output" and value else value  # DIR/ is DIR
        if wanted != getattr(config, name):
            fixed.append(f"--{name.replace('_', '-')}")
    if fixed:
        flags = ", ".join(sorted(fixed))
        raise ValueError(f"a run goes on with its own settings: {flags} cannot change with --resume")
    return replace(config, **changed)


def _add_flags(kind: type[Settings], parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="settings as YAML or TOML; flags go before it")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run folder, from its last checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and its ε, and train nothing")
    groups: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for item in fields(kind):
        name = item.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], item, hints[item.name])


def _add_flag(group: Any, item: Field[Any], hint: Any) -> None:
    """A flag that is None if it is not given: then a file or the field's default holds."""
    flag = f"--{item.name.replace('_', '-')}"
    text = item.metadata["help"].replace("%", "%%")  # argparse formats it
    if item.default is not MISSING and item.default is not None:
        text += f" (default: {item.default})"
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    kinds = get_args(hint) or (hint,)  # float | None has two
    kind = next(one for one in kinds if one is not type(None))
    if item.metadata["choices"]:
        group.add_argument(flag, type=kind, choices=item.metadata["choices"], help=text)
    else:
        metavar = {int: "N", float: "X", str: "TEXT"}[kind]
        group.add_argument(flag, type=kind, metavar=metavar, help=text)


def _check_type(item: Field[Any], value: Any, hint: Any) -> None:
    """Refuses a value of another type than the field's, since configuration files may hold any."""
    kinds = get_args(hint) or (hint,)  # float | None has two
    choices = item.metadata["choices"]
    has_type = any(_is_of_kind(value, kind) for kind in kinds)
    is_chosen = not choices or value in choices
    if not (has_type and is_chosen):
        names = [getattr(kind, "__name__", str(kind)) for kind in kinds]
        wanted = ", ".join(choices) or " or ".join(names)
        raise ValueError(f"{item.name} must be {wanted}, got {value!r}")
    if isinstance(value, float):
        require(math.isfinite(value), item.name, value, "a finite number")


def _is_of_kind(value: Any, kind: Any) -> bool:
    """Whether a value is a str, bool, None, int or, for float, any number; a bool is no number."""
    if kind in (str, bool, type(None)):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (kind is float and isinstance(value, float))


def require(condition: bool, name: str, value: Any, wanted: str) -> None:
    """Refuses a value, and says what is wanted."""
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
