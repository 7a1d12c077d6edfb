"""Checkpoints: tensors as safetensors, everything else as JSON, whole or not there at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edpsgd import files

_TENSOR = "tensor:"  # in the JSON, stands before the name that a tensor has in the safetensors file
_TUPLE = "tuple"


def save_weights(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Writes a model's tensors, so that whoever looks finds the old file or the new one, whole."""
    copies = {name: _copied(tensor) for name, tensor in state.items()}
    try:
        with files.replaced_file(path, path.with_name(f".{path.name}.new")) as temporary:
            save_file(copies, temporary)
    except SafetensorError as error:  # a full disk, for one
        raise OSError(f"cannot write {path}: {error}") from None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The same on the CPU in memory of its own: safetensors refuses tensors that share memory."""
    return tensor.detach().cpu().contiguous().clone()


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """What save_weights wrote: the tensors by their names, on the CPU."""
    try:
        os.close(files.open_regular(path))  # load_file would wait for a FIFO
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights {path} are damaged: {error}") from None


def save(folder: Path, step: int, model: Mapping[str, torch.Tensor], optimizer: Any, state: Mapping[str, Any]) -> Path:
    """Writes a checkpoint into a folder of its own, and then removes older ones.

    Args:
        folder: of all checkpoints of the run.
        step: the number of steps taken, which names the checkpoint.
        model: its tensors.
        optimizer: its state, made of dictionaries, lists, tuples, tensors and what JSON knows.
        state: of the job, JSON-ready.

    Returns:
        The folder of this checkpoint.
    """
    files.make_private(folder)
    final = _free_name(folder, step)
    with files.replaced_folder(final, folder / ".new") as temporary:
        save_weights(temporary / "weights.safetensors", model)
        tensors: dict[str, torch.Tensor] = {}
        content = {"step": step, "optimizer": _without_tensors(optimizer, tensors), "state": state}
        save_weights(temporary / "optimizer.safetensors", tensors)
        files.write_text(temporary / "state.json", json.dumps(content))
    for old in _all(folder):
        if old != final:
            shutil.rmtree(old, ignore_errors=True)
    return final


def load(folder: Path) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    """The last checkpoint of a folder: the model's tensors, the optimizer's state and the job's."""
    found = latest(folder)
    if found is None:
        raise ValueError(f"there is no checkpoint in {folder}")
    try:
        content = files.read_json(found / "state.json", files.LARGE)
        tensors = load_weights(found / "optimizer.safetensors")
        weights = load_weights(found / "weights.safetensors")
        return weights, _with_tensors(content["optimizer"], tensors), content["state"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {found} is damaged: {error!r}") from None


def latest(folder: Path) -> Path | None:
    """The last checkpoint of a folder, None if there is none."""
    return max(_all(folder), default=None)


def last_step(folder: Path) -> int:
    """The step of the last checkpoint, by the name of its folder; 0 if there is none."""
    found = latest(folder)
    return 0 if found is None else int(found.name.split("-")[1])


def _free_name(folder: Path, step: int) -> Path:
    """A name that no checkpoint has: a second one of a step is written beside the first.

    The first is removed when the second is whole.
    """
    name = f"step-{step:09d}"
    same = max(folder.glob(f"{name}*"), default=None)
    if same is None:
        return folder / name
    number = int(same.name[len(name) + 1 :] or 0)  # that of the first is not written
    return folder / f"{name}-{number + 1:03d}"


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _without_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON knows it: without int keys, tuples and tensors, which are put into `tensors`."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value
        return _TENSOR + name
    if isinstance(value, str) and value.startswith(_TENSOR):
        raise ValueError(f"a state must not hold texts that begin with {_TENSOR!r}")
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            pairs.append([_without_tensors(key, tensors), _without_tensors(item, tensors)])
        return {"items": pairs}
    if isinstance(value, tuple):
        return {_TUPLE: [_without_tensors(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What _without_tensors was given, of its JSON and the tensors."""
    if isinstance(value, str) and value.startswith(_TENSOR):
        return tensors[value[len(_TENSOR) :]]
    if isinstance(value, dict) and _TUPLE in value:
        return tuple(_with_tensors(item, tensors) for item in value[_TUPLE])
    if isinstance(value, dict):
        restored = {}
        for key, item in value["items"]:
            restored[_with_tensors(key, tensors)] = _with_tensors(item, tensors)
        return restored
    if isinstance(value, list):
        return [_with_tensors(item, tensors) for item in value]
    return value
