"""Files that would fill the memory or make a job wait for ever: a clear error each, soon and in little memory."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from edpsgd import Ledger, LedgerError, cli, files
from mia import audit
from mia.phrases import Manifest
from mia.views import View
from models import vectors
from tasks import language_model, predict, train
from tasks.common import checkpoints, progress, run_opening
from tasks.common.fasttext_vectors import Sentences
from tasks.language import readers as users_readers
from tasks.language import run_folder as language_run_folder
from tasks.language.dictionary import Dictionary
from tasks.nlu import canaries, new_model, readers, run_folder
from tasks.nlu.configuration import Config, read_file
from tasks.nlu.corpus import Corpus
from tasks.nlu.generator import utterances
from tests.helpers.jobs import run as run_job
from tests.helpers.jobs import tiny, tiny_encoder

pytestmark = pytest.mark.timeout(60)  # a job that waits for a FIFO waits for ever

LENGTH = 100 * 10**6
MEMORY = 60 * 10**6


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- long lines


def long_file(path: Path, start: bytes = b"") -> Path:
    """One line of 100 MB, which takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(start)
    os.truncate(path, LENGTH)
    return path


def aligned(folder: Path) -> Path:
    for name in readers.ALIGNED:
        long_file(folder / "train" / name)
    return folder


def vector_file(path: Path) -> Path:
    """A line of 100 MB behind a good first one, packed to a thousandth."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b"10 3\ncall 1 0 0\n")
        for _ in range(100):
            file.write(b"1" * (LENGTH // 100))
    return path


LONG: dict[str, Callable[[Path], object]] = {
    "jsonl": lambda p: readers.read("jsonl", long_file(p / "a.jsonl")),
    "conll": lambda p: readers.read("conll", long_file(p / "a.conll")),
    "atis": lambda p: readers.read("atis", aligned(p)),
    "nlu-eval": lambda p: readers.read("nlu-eval", long_file(p / "a.csv", b"scenario;intent;answer_annotation\n")),
    "users": lambda p: users_readers.read_jsonl(long_file(p / "a.jsonl")),
    "plays": lambda p: users_readers.read_shakespeare(long_file(p / "a.txt", b"ROMEO:\n")),
    "dictionary": lambda p: Dictionary.load(long_file(p / "words.txt", b"call\n")),
    "word list": lambda p: word_list(long_file(p / "words.txt", b"call\n")),
    "vec": lambda p: vectors.load(long_file(p / "a.vec", b"2 3\ncall 1 0 0\n")),
    "vec.gz": lambda p: vectors.load(vector_file(p / "a.vec.gz")),
    "corpus of vectors": lambda p: list(Sentences(long_file(p / "a.txt"))),
    "ledger": lambda p: Ledger.read(long_file(p / "ledger.jsonl")),
    "open ledger": lambda p: Ledger(long_file(p / "ledger.jsonl")),
    "configuration": lambda p: read_file(long_file(p / "config.yaml", b"epochs: 3")),
    "labels": lambda p: labels_of(long_file(p / "labels.json")),
    "counts": lambda p: run_folder.check_data(long_file(p / "data.json").parent, None),
}


def word_list(path: Path) -> object:
    return new_model.build(Config(private="off", vocabulary=str(path)), Corpus(utterances(9)), np.arange(9))


def labels_of(path: Path) -> object:
    return new_model.build(Config(private="off", labels=str(path)), Corpus(utterances(9)), np.arange(9))


@pytest.mark.parametrize("name", LONG)
def test_a_line_of_100_megabytes(tmp_path, name) -> None:
    with little_memory(), pytest.raises(ValueError, match="long|larger|too large|no YAML|damaged"):
        LONG[name](tmp_path)


def test_a_long_line_to_answer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(predict, "check_ended", lambda folder: None)
    parts = new_model.build(Config(private="off", hidden=4, dimension=4, layers=1), Corpus(utterances(9)), np.arange(9))
    monkeypatch.setattr(predict, "load", lambda folder: parts)
    with little_memory(), pytest.raises(SystemExit, match="line 1 is longer than"):
        predict.main(["--run", "x", str(long_file(tmp_path / "said.txt"))])


def test_a_bomb_of_vectors(tmp_path) -> None:
    """Every line is a good one, and all together are 300 times the file."""
    zeros = b" 0" * 5000 + b"\n"
    with gzip.open(tmp_path / "a.vec.gz", "wb", compresslevel=6) as file:
        file.write(b"8000 5000\n")
        for number in range(8000):
            file.write(b"w%d" % number + zeros)
    with pytest.raises(ValueError, match=r"a\.vec\.gz unpacks to more than 50 times its size"):
        vectors.load(tmp_path / "a.vec.gz", scale=False)


def test_packed_vectors_are_read_as_before(tmp_path) -> None:
    table = np.random.default_rng(0).normal(size=(3000, 50)).astype(np.float32)
    rows = "".join(f"w{i} {' '.join(f'{x:.9g}' for x in row)}\n" for i, row in enumerate(table))
    (tmp_path / "a.vec.gz").write_bytes(gzip.compress(f"3000 50\n{rows}".encode()))
    assert np.array_equal(vectors.load(tmp_path / "a.vec.gz", scale=False).table, table)


def test_a_bomb_of_features(tmp_path) -> None:
    zeros = np.zeros((10**6, 20), np.float32)
    np.savez_compressed(tmp_path / "a.npz", version=1, features=zeros, log_probabilities=zeros[:, 0])
    with little_memory(), pytest.raises(ValueError, match="no feature file"):
        View.load(tmp_path / "a.npz")


# ---------------------------------------------------------------- nesting


def laughs() -> str:
    """Ten levels of ten of the level before, under names that a configuration may have."""
    names = ("data", "task", "model", "labels", "split", "output", "vocabulary", "precision", "device", "private")
    lines = [f"{names[0]}: &a0 [{', '.join(['ha'] * 10)}]"]
    for level, name in enumerate(names[1:], 1):
        lines.append(f"{name}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [laughs(), "data: " + "[" * 9000 + "]" * 9000, "data: " + "{a: " * 9000, "data: &x [*x]", "data: [[a]]", "- " * 9],
    ids=["laughs", "lists", "maps", "itself", "list of lists", "no names"],
)
def test_nested_yaml(tmp_path, text) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with little_memory(), pytest.raises(ValueError, match="^the configuration .*config.yaml") as error:
        Config(**read_file(path))
    assert len(str(error.value)) < 1000


def test_nested_toml(tmp_path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("data = " + "[" * 9000 + "]" * 9000)
    with pytest.raises(ValueError, match=r"config\.toml is no TOML"):
        read_file(path)


@pytest.mark.parametrize("depth", [300, 100_000])
def test_nested_checkpoints(tmp_path, depth) -> None:
    found = checkpoints.save(tmp_path, 1, {"a": torch.zeros(1)}, {"a": 1}, {})
    nested = '{"items": [["a", ' * depth + "1" + "]]}" * depth
    (found / "state.json").write_text(f'{{"optimizer": {nested}, "state": {{}}}}')
    if depth > 1000:
        with pytest.raises(ValueError, match="is damaged"):
            checkpoints.load(tmp_path)
    else:
        assert checkpoints.load(tmp_path)[2] == {}


# ---------------------------------------------------------------- FIFOs


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A private run with checkpoints and canaries."""
    return run_job(tiny(tmp_path_factory.mktemp("jobs") / "run", checkpoint_every=5, canaries=4)).folder


@pytest.fixture(scope="module")
def language(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("jobs") / "language"
    small = "--users 40 --sentences 4 --words 30 --hidden 4 --dimension 4 --cohort 8 --rounds 2 --checkpoint-every 1"
    noise = "--clip-norm 2 --noise-multiplier 1 --no-tensorboard"
    language_model.main([*small.split(), *noise.split(), "--output", str(folder)])
    return folder


def with_fifos(folder: Path, copy: Path) -> Iterator[Path]:
    """The folder again and again, each time with a FIFO in place of another of its files."""
    shutil.copytree(folder, copy)
    for file in sorted(path for path in copy.rglob("*") if path.is_file()):
        content = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        yield file
        file.unlink()
        file.write_bytes(content)


def refuses(call: Callable[[], object]) -> bool:
    """Whether it ends with an error that users can read."""
    try:
        return call() not in (None, 0)
    except (ValueError, OSError, SystemExit):
        return True


def test_a_fifo_in_a_run_folder(whole, tmp_path, capsys) -> None:
    """Nobody waits, and whoever needs the file says so."""
    refused, folder = {}, tmp_path / "run"
    for file in with_fifos(whole, folder):
        refused[str(file.relative_to(folder))] = {
            "resume": refuses(lambda: train.main(["--resume", str(folder)])),
            "predict": refuses(lambda: predict.main(["--run", str(folder), "--text", "call anna"])),
            "card": refuses(lambda: cli.main(["card", str(folder)])),
            "claim": refuses(lambda: audit._claimed(folder, None) and None),
            "canaries": refuses(lambda: canaries.load(folder) and None),
        }
    assert all(found["resume"] for found in refused.values())
    predicting = {"labels.json", "model.json", "weights.safetensors", "metrics.jsonl"}
    assert {name for name, found in refused.items() if found["predict"]} >= predicting
    assert refused["ledger.jsonl"]["card"]
    assert refused["privacy_card.json"]["card"]
    assert refused["privacy_card.json"]["claim"]
    assert refused["canaries.jsonl"]["canaries"]
    capsys.readouterr()


def test_a_fifo_in_the_run_folder_of_a_language_model(language, tmp_path) -> None:
    needed = {language_run_folder.MODEL, language_run_folder.DICTIONARY, run_opening.WEIGHTS}
    folder = tmp_path / "run"
    for file in with_fifos(language, folder):
        assert refuses(lambda: language_model.main(["--resume", str(folder)])), file
        assert refuses(lambda: language_run_folder.load_model(folder) and None) == (
            str(file.relative_to(folder)) in needed
        ), file


def test_a_fifo_in_the_folder_of_a_tokenizer(tmp_path) -> None:
    """Also behind a link."""
    encoder = tiny_encoder(tmp_path / "encoder")
    corpus = Corpus(utterances(9))
    parts = new_model.build(Config(private="off", model="bert", pretrained=encoder), corpus, np.arange(9))
    parts.save(tmp_path / "run")
    parts.save_weights(tmp_path / "run")
    shutil.move(tmp_path / "run" / "vocabulary", tmp_path / "elsewhere")
    (tmp_path / "run" / "vocabulary").symlink_to(tmp_path / "elsewhere")
    run_folder.load(tmp_path / "run")
    for name in os.listdir(tmp_path / "elsewhere"):
        content = (tmp_path / "elsewhere" / name).read_bytes()
        (tmp_path / "elsewhere" / name).unlink()
        os.mkfifo(tmp_path / "elsewhere" / name)
        with pytest.raises(ValueError, match="no regular file"):
            run_folder.load(tmp_path / "run")
        (tmp_path / "elsewhere" / name).unlink()
        (tmp_path / "elsewhere" / name).write_bytes(content)


FIFOS: dict[str, Callable[[Path], object]] = {
    "data": lambda p: readers.read("jsonl", p),
    "vectors": lambda p: vectors._read_text(p, 10),
    "features": View.load,
    "weights": checkpoints.load_weights,
    "dictionary": Dictionary.load,
    "configuration": read_file,
    "manifest": lambda p: Manifest.load(p, Dictionary(["call"])),
    "metrics": lambda p: progress.record(p.parent, {"step": 1}),
    "log": files.open_to_append,
}


@pytest.mark.parametrize("name", FIFOS)
def test_a_fifo_instead_of_a_file(tmp_path, name) -> None:
    path = tmp_path / progress.METRICS
    os.mkfifo(path)
    with pytest.raises((ValueError, OSError), match="no regular file|damaged|cannot"):
        FIFOS[name](path)


# ---------------------------------------------------------------- the ledger of a run that goes on


def lose(path: Path, how: str) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "cut": b"".join(lines[:2])}[how])


@pytest.mark.parametrize("knows", ["checkpoint", "metrics", "both"])
@pytest.mark.parametrize("how", ["deleted", "emptied", "cut"])
def test_a_ledger_that_knows_less_than_the_run(whole, tmp_path, how, knows) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    if knows == "checkpoint":
        (folder / progress.METRICS).unlink()
    if knows == "metrics":
        lines = (folder / progress.METRICS).read_text().splitlines()
        (folder / progress.METRICS).write_text("".join(f"{one}\n" for one in lines if "test_" not in one))
        shutil.rmtree(folder / "checkpoints")
    lose(folder / run_opening.LEDGER, how)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(LedgerError, match="holds 0 steps, and the run has taken"):
        run_job(Config(**{**read_file(folder / "config.yaml"), "output": str(folder)}), resume=folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_count_of_a_run(whole) -> None:
    """Of a run that was told nothing: no steps; of a line that was cut off: those before it."""
    lines = [json.loads(line)["step"] for line in (whole / progress.METRICS).read_text().splitlines()]
    assert progress.last_step(whole) == max(lines) > 0
    assert checkpoints.last_step(whole / "checkpoints") == max(lines)
    assert progress.last_step(whole / "checkpoints") == 0
    assert checkpoints.last_step(whole / "nothing") == 0


# ---------------------------------------------------------------- files and folders that are replaced in one step


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path) -> None:
    path, temporary = tmp_path / "weights", tmp_path / ".weights.new"
    path.write_bytes(b"old")
    temporary.write_bytes(b"left by a process that was killed")

    def fail() -> None:
        with files.replaced_file(path, temporary) as place:
            assert not place.exists()
            place.write_bytes(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("weights", b"old")]
    with files.replaced_file(path, temporary) as place:
        place.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("weights", b"new")]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("fails", [True, False])
def test_a_replaced_folder_is_whole_or_not_there(tmp_path, fails) -> None:
    (tmp_path / ".new").mkdir()
    (tmp_path / ".new" / "left").touch()

    def fill() -> None:
        with files.replaced_folder(tmp_path / "step-1", tmp_path / ".new") as place:
            (place / "state").touch()
            if fails:
                raise KeyError

    if fails:
        with pytest.raises(KeyError):
            fill()
        assert not list(tmp_path.iterdir())
    else:
        fill()
        assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")] == ["step-1", "step-1/state"]


def test_what_is_replaced_is_on_disk_first(tmp_path, monkeypatch) -> None:
    """The content before its name; of a folder, the names in it, and then its own in the folder around it."""
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def replace(old, new) -> None:
        calls.append(f"{Path(old).name} > {Path(new).name}")
        real_replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    with files.replaced_file(tmp_path / "a", tmp_path / ".a.new") as place:
        place.touch()
    with files.replaced_folder(tmp_path / "b", tmp_path / ".b.new"):
        pass
    assert calls == [".a.new", ".a.new > a", ".b.new", ".b.new > b", tmp_path.name]
