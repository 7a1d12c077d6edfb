"""Reading corpora in every format; the errors are in test_read_errors.py."""

from __future__ import annotations

import csv
import json
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.nlu.corpus import Utterance
from tasks.nlu.readers import read
from tests.helpers.corpora import HEADER, aligned, data_folder, written

# ---------------------------------------------------------------- what each format means


def test_aligned_files_of_all_parts_are_pooled_in_order(tmp_path):
    for part, word in (("test", "three"), ("train", "one"), ("valid", "two")):
        written(tmp_path / "atis" / part, {"seq.in": f"{word} \n", "seq.out": "B-n \n", "label": f"i_{word}\n"})
    expected = [Utterance((word,), ("B-n",), f"i_{word}") for word in ("one", "two", "three")]
    assert list(read("atis", tmp_path)) == expected
    assert list(read("atis", tmp_path / "atis")) == expected
    assert list(read("snips", tmp_path / "atis")) == expected  # the same layout


@pytest.mark.parametrize(
    ("annotation", "words", "tags"),
    [
        ("wake me", "wake me", "O O"),
        ("at [time : five am] [date : today]", "at five am today", "O B-time I-time B-date"),
        ("[time : 5:30 pm]", "5:30 pm", "B-time I-time"),
        ("[a:b][a :: c]", "b c", "B-a B-a"),
        ("[person : robert], what's up", "robert , what's up", "B-person O O O"),
    ],
)
def test_annotations_of_nlu_eval(tmp_path, annotation, words, tags):
    written(tmp_path, {"nlu-eval/a.csv": f"{HEADER}1;alarm;set;{annotation}\n"})
    expected = [Utterance(tuple(words.split()), tuple(tags.split()), "alarm_set")]
    for path in (tmp_path, tmp_path / "nlu-eval", tmp_path / "nlu-eval" / "a.csv"):
        assert list(read("nlu-eval", path)) == expected


def test_rows_that_the_publishers_leave_out_are_no_bad_lines(tmp_path):
    columns = "userid;answerid;scenario;intent;status;answer_annotation;notes;suggested_entities;answer_normalised;"
    rows = [
        "1;1;alarm;set;;wake me;;;;;",
        '1;2;alarm;set;MOD_XL;"wake ""him""";;;;;',
        *(f"1;3;alarm;set;{status};bad [ one;;;;;" for status in ("IRR", "IRR_XL", "IRR_XR")),
        "1;4;alarm;set;null;null;;;;;",
        "1;5;alarm;set;; ;;;;;",
    ]
    written(tmp_path, {"all.csv": "\n".join([columns + "answer;question", *rows])})
    corpus = read("nlu-eval", tmp_path)
    assert [utterance.words for utterance in corpus] == [("wake", "me"), ("wake", '"him"')]
    assert (corpus.left_out, corpus.skipped, corpus.repaired) == (5, 0, 0)


# ---------------------------------------------------------------- write and read back

LETTERS = st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"], exclude_characters="\ufeff")
WORD = st.text(LETTERS, min_size=1, max_size=6)
PLAIN_WORD = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6).filter(lambda word: word != "null")
KIND = st.from_regex(r"[a-z_.-]{1,8}", fullmatch=True)


def utterances(word: st.SearchStrategy[str] = WORD) -> st.SearchStrategy[list[Utterance]]:
    segment = st.tuples(st.none() | KIND, st.lists(word, min_size=1, max_size=3))
    return st.lists(st.builds(_utterance, st.lists(segment, min_size=1, max_size=4), KIND), min_size=1, max_size=4)


def _utterance(segments: Sequence[tuple[str | None, list[str]]], intent: str) -> Utterance:
    words, tags = [], []
    for kind, part in segments:
        words += part
        tags += ["O"] * len(part) if kind is None else [f"B-{kind}"] + [f"I-{kind}"] * (len(part) - 1)
    return Utterance(tuple(words), tuple(tags), intent)


def write_tokens(folder: Path, corpus: Sequence[Utterance]) -> None:
    lines = [json.dumps({"tokens": one.words, "tags": one.tags, "intent": one.intent}) for one in corpus]
    (folder / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_offsets(folder: Path, corpus: Sequence[Utterance]) -> None:
    with open(folder / "a.jsonl", "w", encoding="utf-8") as file:
        for one in corpus:
            ends = [len(" ".join(one.words[: i + 1])) for i in range(len(one.words))]
            slots = [
                {"type": kind, "start": ends[first] - len(one.words[first]), "end": ends[last - 1]}
                for kind, first, last in reversed(one.slots())
            ]
            value = {"text": " ".join(one.words), "intent": one.intent, "slots": slots}
            file.write(json.dumps(value, ensure_ascii=False) + "\n")


def write_conll(folder: Path, corpus: Sequence[Utterance]) -> None:
    with open(folder / "a.conll", "w", encoding="utf-8") as file:
        for one in corpus:
            tokens = "".join(f"{word}\t{tag}\n" for word, tag in zip(one.words, one.tags, strict=True))
            file.write(f"# intent = {one.intent}\n{tokens}\n")


def write_aligned(folder: Path, corpus: Sequence[Utterance]) -> None:
    columns = [[" ".join(u.words) for u in corpus], [" ".join(u.tags) for u in corpus], [u.intent for u in corpus]]
    words, tags, intents = ("".join(f"{line}\n" for line in column) for column in columns)
    written(folder, aligned(words, tags, intents))


@settings(max_examples=60, deadline=None)
@given(corpus=utterances())
@pytest.mark.parametrize(
    ("task", "write"),
    [("jsonl", write_tokens), ("jsonl", write_offsets), ("conll", write_conll), ("atis", write_aligned)],
)
def test_what_was_written_is_read_back(
    task: str, write: Callable[[Path, Sequence[Utterance]], None], corpus: list[Utterance]
):
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), corpus)
        found = read(task, folder)
    assert list(found) == corpus
    assert (found.repaired, found.skipped) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(corpus=utterances(PLAIN_WORD))
def test_what_was_written_as_annotated_csv_is_read_back(corpus: list[Utterance]):
    with tempfile.TemporaryDirectory() as folder:
        with open(Path(folder) / "a.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=";")
            writer.writerow(["scenario", "intent", "answer_annotation"])
            writer.writerows(["home", one.intent, annotated(one)] for one in corpus)
        found = read("nlu-eval", folder)
    assert list(found) == [Utterance(one.words, one.tags, f"home_{one.intent}") for one in corpus]


def annotated(one: Utterance) -> str:
    pieces = list(one.words)
    for kind, first, last in one.slots():
        pieces[first] = f"[{kind} : {pieces[first]}"
        pieces[last - 1] += "]"
    return " ".join(pieces)


def test_files_are_not_read_whole(tmp_path):
    line = json.dumps({"tokens": ["call"], "tags": ["O"], "intent": "a", "note": "x" * 10_000}) + "\n"
    with open(tmp_path / "a.jsonl", "w", encoding="utf-8") as file:
        file.writelines([line] * 1_000)
    tracemalloc.start()
    corpus = read("jsonl", tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(corpus) == 1_000
    assert peak < 1_000_000  # of a file of ten million bytes


# ---------------------------------------------------------------- the real corpora


@pytest.mark.parametrize(
    ("task", "size", "intents"), [("atis", 5871, 26), ("snips", 14484, 7), ("nlu-eval", 11036, 64)]
)
def test_real_corpora(task, size, intents):
    corpus = read(task, data_folder())
    assert (len(corpus), len(corpus.intents)) == (size, intents)
    assert (corpus.repaired, corpus.skipped, corpus.left_out) == (0, 0, 0)
    assert np.diff(corpus.starts).min() >= 1


def test_the_words_of_nlu_eval_are_those_that_its_publishers_found():
    with open(data_folder() / "nlu-eval" / "annotated.csv", encoding="utf-8", newline="") as file:
        texts = ["".join(row["answer_from_anno"].split()) for row in csv.DictReader(file, delimiter=";")]
    assert ["".join(utterance.words) for utterance in read("nlu-eval", data_folder())] == texts
