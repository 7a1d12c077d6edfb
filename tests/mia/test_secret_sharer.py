"""What a model has memorised: ranks and beam search against brute force, interruptions, the command."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch

from mia import extraction, secret_sharer
from mia.extraction import Tally, all_suffixes, beam_search, exposure, log_perplexity, random_suffixes, rank
from mia.phrases import FIRST, Canary, Configuration, Manifest, make
from mia.secret_sharer import Result, main, measure, summary, table
from models.language_model import LanguageModel
from tasks.common.checkpoints import save_weights
from tasks.language.dictionary import BOS, Dictionary
from tasks.language.readers import read_jsonl, write_jsonl
from tasks.language.user_texts import RawUsers, windows

WORDS = 11  # of the small models: 8 and the three special ones
OFTEN, NEVER = Configuration(1.0, 1.0), Configuration(0.0, 0.0)
NAMES = Dictionary(["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"])
SECRET = (5, 9, 4, 10, 7)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fresh(seed: int = 0, words: int = WORDS) -> LanguageModel:
    """With larger weights than at the beginning of a training, so that words differ in what they cost."""
    torch.manual_seed(seed)
    model = LanguageModel(words, dimension=6, hidden=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def trained() -> LanguageModel:
    """Has seen nothing but the secret, many times."""
    model = fresh()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = (torch.from_numpy(part) for part in windows([np.array(SECRET)]))
    for _ in range(200):
        optimizer.zero_grad()
        model.losses(inputs, targets).sum().backward()
        optimizer.step()
    return model


def exact(model: LanguageModel) -> LanguageModel:
    return copy.deepcopy(model).double()


@torch.no_grad()
def cost(model: LanguageModel, phrase: tuple[int, ...], given: int) -> float:
    """Word by word, each after a forward of its own."""
    bits = 0.0
    for place in range(given, len(phrase)):
        logits, _ = model(torch.tensor([[BOS, *phrase[:place]]]))
        bits -= math.log2(logits[0, -1].softmax(0)[phrase[place]].item())
    return bits


# -------------------------------------------------------------------- what a model says


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exposure(0, 5), "rank must be from 1 to the number of candidates, got 0 of 5"),
        (lambda: random_suffixes(3, 10, seed=0), "there must be a suffix"),
        (lambda: rank(fresh(), (3, 4, 5), all_suffixes(WORDS, 2)), "suffixes must have 1 words"),
        (lambda: log_perplexity(fresh(), [[3, WORDS]]), "words must be from 0 to 10, got 3 to 11"),
        (lambda: log_perplexity(fresh(), [3, 4]), r"sequences must be \(n, L\)"),
        (lambda: beam_search(fresh(), [3, 4], length=1), "length must be at least the prefix's 2"),
        (
            lambda: measure(fresh(), Manifest((Canary((5, 6), OFTEN),), (0,), (0,), 0), 10),
            "canary 1: it must have more",
        ),
    ],
)
def test_bad_arguments(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("start", [0, 2, 5])
def test_log_perplexity_against_single_forwards(monkeypatch, start) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 3)
    model = fresh()
    phrases = [canary.words for canary in make(WORDS, [OFTEN], per_configuration=7, seed=1)]
    expected = [cost(exact(model), phrase, start) for phrase in phrases]
    np.testing.assert_allclose(log_perplexity(model, phrases, start), expected, rtol=1e-5)


def test_log_perplexity_of_no_phrases() -> None:
    assert log_perplexity(fresh(), np.empty((0, 5), np.int64), 2).shape == (0,)


def plain_rank(model: LanguageModel, phrase: tuple[int, ...], suffixes: list[tuple[int, ...]]) -> tuple[int, int]:
    """The least and the largest rank that rounding allows, suffix by suffix."""
    model, known = exact(model), {}
    own = cost(model, phrase, 2)
    for suffix in {*suffixes} - {phrase[2:]}:
        known[suffix] = cost(model, (*phrase[:2], *suffix), 2)
    costs = np.array([known[suffix] for suffix in suffixes if suffix != phrase[2:]])
    return 1 + int((costs <= own - 1e-4).sum()), 1 + int((costs <= own + 1e-4).sum())


@pytest.mark.parametrize("chunk", [50, 512])
def test_rank_among_all_suffixes_against_brute_force(monkeypatch, trained, chunk) -> None:
    """8 to the third suffixes; one model knows nothing, the other gives most suffixes up after a word or two."""
    monkeypatch.setattr(extraction, "CHUNK", chunk)
    suffixes = list(product(range(FIRST, 9), repeat=3))
    for model, phrase in [(fresh(1, 9), (4, 8, 3, 3, 5)), (fresh(2, 9), (3, 3, 8, 7, 8))]:
        least, most = plain_rank(model, phrase, suffixes)
        found = rank(model, phrase, all_suffixes(9))
        assert least <= found.rank <= most <= least + 1
        assert (found.candidates, found.same) == (6**3, 1)
    every = all_suffixes(WORDS)
    costs = log_perplexity(trained, np.hstack([np.tile(SECRET[:2], (len(every), 1)), every]), 2)
    for place in np.argsort(costs)[[0, 1, 5, 100, 511]]:  # by the whole forward, nothing given up
        found = rank(trained, (*SECRET[:2], *every[place].tolist()), every)
        assert abs(found.ahead - int((costs < costs[place]).sum())) <= int((abs(costs - costs[place]) < 1e-4).sum()) - 1


def test_rank_among_random_suffixes_counts_every_draw() -> None:
    model, phrase = fresh(3, 8), (4, 5, 3, 7, 6)
    drawn = random_suffixes(8, 300, seed=4)  # of 125, so that many are drawn more than once
    assert [tuple(row) for row in drawn.tolist()] == sorted(tuple(row) for row in drawn.tolist())
    least, most = plain_rank(model, phrase, [tuple(row) for row in drawn.tolist()])
    found = rank(model, phrase, drawn)
    assert least <= found.rank <= most <= least + 3
    assert found.same == [tuple(row) for row in drawn.tolist()].count(phrase[2:]) > 0
    assert found.candidates == 301 - found.same


def test_random_suffixes_are_uniform_over_words() -> None:
    drawn = random_suffixes(13, 20_000, seed=0)
    assert (drawn.min(), drawn.max()) == (FIRST, 12)
    counts = np.stack([np.bincount(column, minlength=13)[FIRST:] for column in drawn.T])
    assert abs(counts - 2000).max() <= 5 * math.sqrt(20_000 * 0.1 * 0.9)
    assert not np.array_equal(drawn, random_suffixes(13, 20_000, seed=1))


def test_a_model_that_learned_the_secret_gives_it_away(trained) -> None:
    found = rank(trained, SECRET, all_suffixes(WORDS))
    assert (found.rank, exposure(found.rank, found.candidates)) == (1, 9.0)
    assert beam_search(trained, SECRET[:1])[0][0] == SECRET


def test_a_model_that_never_saw_the_canaries_ranks_them_anywhere() -> None:
    """Ranks of 60 canaries, uniform from 1 to 801: their mean within four standard deviations, and no pile at 1."""
    model = fresh(5, 53)
    canaries = make(53, [NEVER], per_configuration=60, seed=6)
    results = measure(model, Manifest(tuple(canaries), (0,) * 60, (0,) * 60, 6), 800, seed=1)
    shares = [result.rank / result.candidates for result in results]
    assert abs(np.mean(shares) - 0.5) <= 4 * math.sqrt(1 / 12 / 60)
    assert np.quantile(shares, 0.25) > 0.05
    assert np.quantile(shares, 0.75) < 0.95
    assert sum(result.found_by_beam for result in results) == 0


def test_a_model_that_finds_all_alike_has_memorised_nothing() -> None:
    model = fresh()
    torch.nn.init.zeros_(model.output.weight)
    torch.nn.init.zeros_(model.output.bias)
    found = rank(model, SECRET, all_suffixes(WORDS))
    assert found.rank == found.candidates == 512
    assert exposure(found.rank, found.candidates) == 0.0


@pytest.mark.parametrize(("words", "given", "length"), [(7, 1, 4), (9, 2, 4), (6, 0, 3)])
def test_wide_beams_against_all_phrases(words, given, length) -> None:
    model, prefix = fresh(7, words), (4, 3)[:given]
    phrases = [(*prefix, *rest) for rest in product(range(FIRST, words), repeat=length - given)]
    plain = exact(model)
    expected = sorted((cost(plain, phrase, given), phrase) for phrase in phrases)
    found = beam_search(model, prefix, length, beams=len(phrases) + 3)
    np.testing.assert_allclose([bits for _, bits in found], [bits for bits, _ in expected], rtol=1e-5)
    assert sorted(phrase for phrase, _ in found) == phrases
    assert found[0][0] == expected[0][1]


@pytest.mark.parametrize("beams", [1, 2])
def test_narrow_beams_keep_the_cheapest_beginnings(beams) -> None:
    model, kept = fresh(8), [(6,)]
    plain = exact(model)
    for _ in range(4):
        longer = [(*phrase, word) for phrase in kept for word in range(FIRST, WORDS)]
        kept = sorted(longer, key=lambda phrase: cost(plain, phrase, 1))[:beams]
    assert [phrase for phrase, _ in beam_search(model, [6], beams=beams)] == kept


# -------------------------------------------------------------------- measuring


def planted() -> Manifest:
    canaries = Canary(SECRET, OFTEN), Canary((3, 4, 8, 6), NEVER), Canary((9, 9, 3, 8, 8), NEVER)
    return Manifest(canaries, sharers=(4, 0, 0), insertions=(9, 0, 0), seed=1)


def test_results_and_their_summary(trained) -> None:
    results = measure(trained, planted(), None)
    assert [result.candidates for result in results] == [512, 64, 512]
    assert [result.memorised_by_sampling for result in results] == [True, False, False]
    assert [result.found_by_beam for result in results] == [True, False, False]
    found = summary(results)
    assert [row["random_sampling"] for row in found["configurations"]] == [1, 0]
    assert [row["users_rate"] for row in found["configurations"]] == [1.0, 0.0]
    assert (found["all"]["random_sampling"], found["all"]["beam_search"], found["all"]["canaries"]) == (1, 1, 3)
    assert found["all"]["by_chance"] == pytest.approx(2 / 512 + 1 / 64)
    assert results[0].to_json()["exposure"] == 9.0
    assert json.loads(json.dumps(results[0].to_json()))["configuration"] == {"users_rate": 1.0, "examples_rate": 1.0}


def test_a_summary_by_hand() -> None:
    few, many = Configuration(0.1, 0.5), Configuration(0.2, 0.5)
    results = [Result(few, 1, 2, 1, 256, False), Result(many, 3, 8, 1, 256, True), Result(few, 2, 6, 64, 256, False)]
    found = summary(results)
    assert found["configurations"][0] == {
        "users_rate": 0.1,
        "examples_rate": 0.5,
        "canaries": 2,
        "sharers": 1.5,
        "insertions": 4,
        "random_sampling": 1,
        "by_chance": 2 / 256,
        "beam_search": 0,
        "median_exposure": 5.0,
    }
    lines = table(found).splitlines()
    assert lines[1].split() == ["0.1", "0.5", "2", "1.5", "4.0", "1", "0", "5.0"]
    assert lines[3].split() == ["all", "3", "2.0", "5.3", "2", "1", "8.0"]
    assert len({len(line) for line in lines}) == 1


@contextmanager
def counted_chunks(after: int = -1) -> Iterator[list[int]]:
    """Notes where each chunk begins, and ends the work as a user would after so many."""
    chunks, original = [], extraction.Sampling.go_on

    def go_on(sampling, tally, suffixes) -> None:
        if len(chunks) == after:
            raise KeyboardInterrupt
        chunks.append(tally.done)
        original(sampling, tally, suffixes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extraction.Sampling, "go_on", go_on)
        yield chunks


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(extraction, "CHUNK", 40)
    model, manifest, partial = fresh(4), planted(), tmp_path / "ranks.partial"
    whole = measure(model, manifest, 400, seed=3)
    for after in (3, 4, 8):
        with counted_chunks(after), pytest.raises(KeyboardInterrupt):
            measure(model, manifest, 400, seed=3, partial=partial)
        assert partial.exists()
    with counted_chunks() as last:
        assert measure(model, manifest, 400, seed=3, partial=partial) == whole
    assert last == [*range(200, 400, 40), *range(0, 400, 40)]  # 15 of the 30 chunks were done
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_another_model_or_draw_are_begun_anew(tmp_path) -> None:
    manifest, partial = planted(), tmp_path / "ranks.partial"
    for model, seed in ((fresh(5), 3), (fresh(4), 4)):
        with counted_chunks(2), pytest.raises(KeyboardInterrupt):
            measure(model, manifest, 400, seed=seed, partial=partial)
        assert measure(fresh(4), manifest, 400, seed=3, partial=partial) == measure(fresh(4), manifest, 400, seed=3)
    partial.write_text("{")
    with pytest.raises(ValueError, match="is no file of ranks in the making, or it is damaged"):
        measure(fresh(4), manifest, 400, seed=3, partial=partial)


def test_progress_without_a_terminal_is_lines(capsys, monkeypatch) -> None:
    monkeypatch.setattr(secret_sharer.Progress, "wants", lambda progress: progress._is_shown)
    measure(fresh(), planted(), 100)
    assert capsys.readouterr().out == ""
    measure(fresh(), planted(), 100, is_shown=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("left")[0].split()[:6] for line in lines] == [
        ["step", f"{number}/3", "canary", str(number), "of", "3"] for number in (1, 2, 3)
    ]


# -------------------------------------------------------------------- the command


def write_run(folder: Path, model: LanguageModel) -> None:
    folder.mkdir()
    (folder / "language_model.json").write_text(json.dumps(model.settings()))
    save_weights(folder / "weights.safetensors", model.state_dict())
    NAMES.save(folder / "dictionary.txt")


def test_insert_and_measure_on_the_command_line(tmp_path, trained, capsys) -> None:
    write_run(tmp_path / "run", trained)
    names = tmp_path / "run" / "dictionary.txt"
    write_jsonl(tmp_path / "users.jsonl", RawUsers(["u", "v"], [["Cat dog"] * 6, ["hen"] * 6]))
    (tmp_path / "own.txt").write_text(" ".join(NAMES.decode(SECRET)) + "\nant bee cat dog\n")
    insert_flags = ["insert", "--users", str(tmp_path / "users.jsonl"), "--dictionary", str(names)]
    main(
        [*insert_flags, "--output", str(tmp_path / "d"), "--phrases", str(tmp_path / "own.txt"), "--rates", "1:1/2,0:0"]
    )
    inside = [text for own in read_jsonl(tmp_path / "d" / "users.jsonl").texts for text in own]
    rows = json.loads((tmp_path / "d" / "canaries.json").read_text())["canaries"]
    assert rows[0]["insertions"] == inside.count(" ".join(NAMES.decode(SECRET))) > 0
    assert rows[1]["insertions"] == 0
    measure_flags = ["measure", "--run", str(tmp_path / "run"), "--canaries", str(tmp_path / "d" / "canaries.json")]
    main([*measure_flags, "--suffixes", "1000", "--device", "cpu"])
    content = json.loads((tmp_path / "run" / "exposure.json").read_text())
    assert (content["suffixes"], content["beams"], content["prefix"], content["seed"]) == (1000, 5, 2, 0)
    assert [row["rank"] == 1 for row in content["canaries"]] == [True, False]
    assert content["summary"]["all"]["beam_search"] == 1
    assert "rank 1 among 1000 suffixes" in capsys.readouterr().out
    main([*measure_flags, "--suffixes", "all", "--output", str(tmp_path / "new" / "all.json"), "--device", "cpu"])
    assert json.loads((tmp_path / "new" / "all.json").read_text())["canaries"][0]["candidates"] == 512
    main([*insert_flags, "--output", str(tmp_path / "e"), "--rates", "1:0.1,1:0.2", "--per", "3"])
    assert len(json.loads((tmp_path / "e" / "canaries.json").read_text())["canaries"]) == 6


def test_errors_on_the_command_line_are_one_line(tmp_path) -> None:
    run = tmp_path / "run"
    write_run(run, fresh())
    canaries = tmp_path / "canaries.json"
    planted().save(canaries, NAMES)

    def fails(message: str, *flags: str) -> None:
        with pytest.raises(SystemExit, match=f"^error: .*{message}[^\n]*$"):
            main(["measure", "--run", str(run), "--canaries", str(canaries), *flags])

    fails("is not the run folder of a language model", "--run", str(tmp_path))
    fails("there is no such file", "--canaries", str(tmp_path / "none.json"))
    fails("there must be a suffix", "--suffixes", "0")
    Dictionary(NAMES.words[1:]).save(run / "dictionary.txt")
    fails("11 words in the model, 10 in its dictionary")
    (run / "language_model.json").write_text('{"words": "many"}')
    fails("is not the run folder of a language model, or it is damaged")
    with pytest.raises(SystemExit, match="error: rates must be pairs p_u:p_e"):
        main(["insert", "--users", "x", "--dictionary", str(run / "dictionary.txt"), "--output", "y", "--rates", "1"])


def test_a_tally_in_the_making() -> None:
    tally = Tally(done=10, same=1, ahead=4)
    assert (tally.rank, tally.candidates) == (5, 10)
    assert all(exposure(r, 8) > exposure(s, 8) for r, s in pairwise(range(1, 9)))
