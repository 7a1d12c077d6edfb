"""Data with typed fields that is written as JSON and read from any file: the base of what a ledger says of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, get_args, get_origin, get_type_hints

from edpsgd.ledger.events import LedgerError

DEEPEST = 16  # settings of a run are nested three deep

# A setting whose None says that it was not set, such as no decay: it is always written.
CHOICE = {"is_choice": True}


@dataclass(frozen=True, kw_only=True)
class TypedRecord:
    """Typed fields, and what versions before or after this one say beside them.

    Attributes:
        others: values by names that this version does not know; read-only, and written again.
    """

    others: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        types = _field_types(type(self))
        wrong = [name for name, allowed in types.items() if not has_type(getattr(self, name), allowed)]
        if wrong:
            raise refusal(*wrong)
        if any(item.name in self.others for item in _own_fields(type(self))):
            raise LedgerError("a run has a name twice")
        object.__setattr__(self, "others", MappingProxyType(copy.deepcopy(dict(self.others))))

    def _recorded(self) -> dict[str, Any]:
        """Fields by their names: those that were recorded, and those whose None is a setting."""
        recorded = {}
        for item in _own_fields(type(self)):
            value = getattr(self, item.name)
            if value != item.default or "is_choice" in item.metadata:
                recorded[item.name] = value
        return {**recorded, **copy.deepcopy(dict(self.others))}


def constructor_arguments(record: type[Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a record's constructor; what it has no field for is among ``others``.

    Raises:
        LedgerError: for a None where it is no setting: what was not recorded is missing.
    """
    names = {item.name for item in _own_fields(record)}
    arguments: dict[str, Any] = {"others": {}}
    for name, value in settings.items():
        if name in names:
            arguments[name] = value
        else:
            arguments["others"][name] = value
    for item in _own_fields(record):
        is_none = item.name in arguments and arguments[item.name] is None
        if is_none and "is_choice" not in item.metadata:
            raise refusal(item.name)
    return arguments


def has_type(value: object, allowed: tuple[Any, ...]) -> bool:
    """Whether a value has one of these types. An int is a float too; a bool, which is an int for Python, is not."""
    if isinstance(value, bool):
        return bool in allowed
    if isinstance(value, int) and float in allowed:
        return True
    return isinstance(value, allowed)


def refusal(*names: str) -> LedgerError:
    """The error for fields that no run can have written; without their values, which may be anything."""
    return LedgerError(f"a run has {' and '.join(names)} that no run can have written")


def is_nested_too_deep(data: object) -> bool:
    """Whether lists and mappings are in each other more than ``DEEPEST`` times."""
    level = [data]
    for _ in range(DEEPEST + 1):
        containers = [one for one in level if isinstance(one, Mapping | list | tuple)]
        if not containers:
            return False
        level = []
        for container in containers:
            level.extend(container.values() if isinstance(container, Mapping) else container)
    return True


def _own_fields(record: type[Any]) -> list[Field[Any]]:
    return [item for item in fields(record) if item.name != "others"]


_FIELD_TYPES: dict[type[Any], dict[str, tuple[Any, ...]]] = {}  # by class of record, once they were asked for


def _field_types(record: type[Any]) -> dict[str, tuple[Any, ...]]:
    """The types that the values of each field may have, by the names of the fields."""
    if record not in _FIELD_TYPES:
        _FIELD_TYPES[record] = _find_field_types(record)
    return _FIELD_TYPES[record]


def _find_field_types(record: type[Any]) -> dict[str, tuple[Any, ...]]:
    types = {}
    for name, hint in get_type_hints(record).items():
        is_union = get_origin(hint) not in (None, Mapping, tuple)
        members = get_args(hint) if is_union else (hint,)
        types[name] = tuple(get_origin(member) or member for member in members)
    return types
