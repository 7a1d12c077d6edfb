"""What a tuning draws from: candidates, each a few settings that take the place of the job's own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from edpsgd import files
from tasks.common.flags import interpreted, load_yaml
from tasks.nlu.configuration import Config
from tasks.nlu.training_optimizer import initial_rates

Candidate = dict[str, Any]

_LARGEST = 2**20  # bytes
_MOST = 1000  # candidates
_FIXED = ("seed", "early_stopping", "init_from")  # a seed would repeat the noise; the others look at data
_FACTORS = (1 / 3, 1.0, 3.0)  # of the learning rates
_PARTS = (0.5, 1.0, 2.0)  # of batch size and epochs


def names() -> set[str]:
    """The settings that may be searched: those of the model and of the training."""
    groups = {item.name: item.metadata["group"] for item in fields(Config)}
    return {name for name, group in groups.items() if group in ("model", "training") and name not in _FIXED}


def read(path: str | Path) -> list[Candidate]:
    """The candidates of a YAML or JSON file.

    A mapping from names of flags to lists of values stands for all their combinations; a list has a mapping from names
    to values for each candidate.
    """
    try:
        content = load_yaml(files.read_text(path, _LARGEST))  # JSON is YAML
    except OSError as error:
        raise ValueError(f"cannot read the search space {path}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise ValueError(f"the search space {path} is no YAML or JSON") from None
    try:
        return _candidates(content)
    except ValueError as error:
        raise ValueError(f"the search space {path}: {error}") from None


def _candidates(content: object) -> list[Candidate]:
    if isinstance(content, Mapping):
        lists = [value if isinstance(value, list) else [value] for value in content.values()]
        combinations = itertools.islice(itertools.product(*lists), _MOST + 1)
        found = [_named(dict(zip(content, values, strict=True))) for values in combinations]
    elif isinstance(content, list) and all(isinstance(one, Mapping) for one in content):
        found = [_named(one) for one in content]
    else:
        raise ValueError("there must be names with lists of values, or a list of settings")
    if not 1 <= len(found) <= _MOST:
        raise ValueError(f"there must be 1 to {_MOST} candidates, got {len(found) if found else 'none'}")
    return found


def _named(settings: Mapping[Any, Any]) -> Candidate:
    """Settings by the names of their fields."""
    hints, allowed = get_type_hints(Config), names()
    found = {}
    for written_name, value in settings.items():
        name = str(written_name).replace("-", "_")
        if name not in allowed:
            raise ValueError(f"{written_name!r} cannot be searched: only settings of the model and the training can")
        if isinstance(value, Mapping | list):
            raise ValueError(f"{name} must be one value in each candidate")
        found[name] = interpreted(value, hints[name])
    return found


def around(config: Config, most: int) -> list[Candidate]:
    """Learning rates, batch sizes and epochs around those of a job.

    Args:
        config: the job.
        most: the largest batch size of one worker that its data allow.
    """
    rates = [round(rate, 12) for rate in initial_rates(config)]
    sizes = _around(config.batch_size, most)
    found = []
    for factor, size, epochs in itertools.product(_FACTORS, sizes, _around(config.epochs)):
        encoder, heads = (float(f"{rate * factor:.3g}") for rate in rates)
        found.append({"learning_rate": encoder, "head_learning_rate": heads, "batch_size": size, "epochs": epochs})
    return found


def _around(number: int, most: int | None = None) -> list[int]:
    """Half, all and twice of it, as far as these are different."""
    near = {max(1, round(number * part)) for part in _PARTS}
    return sorted(one for one in near if most is None or one <= max(most, number))


def configs(config: Config, candidates: Sequence[Candidate]) -> list[Config]:
    """The settings of the whole job with each candidate; what cannot be is refused before anything is trained."""
    found = []
    for number, candidate in enumerate(candidates, 1):
        try:
            found.append(Config(**{**config.given(), **candidate}))
        except ValueError as error:
            raise ValueError(f"candidate {number} of the search space: {error}") from None
    return found


def searched(candidates: Sequence[Candidate]) -> list[str]:
    """The names of the settings that are not the same in all candidates."""
    every = dict.fromkeys(itertools.chain(*candidates))
    return [name for name in every if len({repr(one.get(name)) for one in candidates}) > 1]
