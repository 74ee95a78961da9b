"""Tokenizers give the ids of their libraries, come back to the text, and say what is wrong."""

from __future__ import annotations

import itertools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import TEXT, hugging_face, name_end, sentence_piece

from jaxpar.data import tokenizers
from jaxpar.data.errors import DataError

text_of_files = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> tokenizers.Tokenizer:
    return tokenizers.load(str(hugging_face(tmp_path_factory.mktemp("bpe"))))


@pytest.fixture(scope="module")
def unigram(tmp_path_factory) -> tokenizers.Tokenizer:
    return tokenizers.load(str(sentence_piece(tmp_path_factory.mktemp("sp"))))


# ---- bytes --------------------------------------------------------------------------------------


@pytest.mark.core
@given(text_of_files)
@settings(max_examples=50, deadline=None)
def test_bytes_are_the_utf8_of_the_text(text: str) -> None:
    tokenizer = tokenizers.load("bytes")
    ids = tokenizer.encode(text)
    assert bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab, tokenizer.end) == (256, 0)


def test_ids_outside_the_vocabulary_show_as_lost(bpe, unigram) -> None:
    """A model may have a larger vocabulary than its tokenizer, and sample from all of it."""
    assert tokenizers.load("bytes").decode([97, 256, 98, 255]) == "a�b�"
    for tokenizer in (bpe, unigram):
        ids = tokenizer.encode("return x").tolist()
        beyond = tokenizer.vocab + 5
        assert tokenizer.decode([*ids, beyond, *ids]).count("�") == 1
        assert tokenizer.decode([*ids, -1]).endswith("�")


# ---- libraries as oracles -----------------------------------------------------------------------


@pytest.mark.core
def test_hugging_face_gives_the_ids_of_the_library(bpe, tmp_path) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(hugging_face(tmp_path)))
    assert bpe.encode(TEXT).tolist() == library.encode(TEXT).ids
    assert [x.tolist() for x in bpe.encode_batch(["a b", "", TEXT[:99]])] == [
        library.encode(text).ids for text in ("a b", "", TEXT[:99])
    ]
    assert bpe.encode(TEXT).dtype == np.int32
    assert bpe.vocab == library.get_vocab_size() == 400
    assert bpe.end == library.token_to_id("<|endoftext|>")


def test_sentencepiece_gives_the_ids_of_the_library(unigram, tmp_path) -> None:
    import sentencepiece

    library = sentencepiece.SentencePieceProcessor(model_file=str(sentence_piece(tmp_path)))
    assert unigram.encode(TEXT).tolist() == library.encode(TEXT)
    assert unigram.encode("").tolist() == []
    assert (unigram.vocab, unigram.end) == (library.get_piece_size(), library.eos_id())
    assert unigram.decode(unigram.encode("return x * 3")) == "return x * 3"


@given(text_of_files)
@settings(max_examples=50, deadline=None)
def test_byte_level_bpe_comes_back_to_the_text(bpe, text: str) -> None:
    assert bpe.decode(bpe.encode(text)) == text


def test_nothing_is_added_cut_off_or_filled_up(tmp_path) -> None:
    """A tokenizer.json may ask for all of it, for other uses."""
    from tokenizers import Tokenizer, processors

    path = hugging_face(tmp_path)
    plain = tokenizers.load(str(path)).encode("return x").tolist()
    asks = Tokenizer.from_file(str(path))
    asks.enable_truncation(2)
    asks.enable_padding(length=50)
    asks.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    asks.save(str(path))
    assert len(asks.encode("return x").ids) == 50
    assert tokenizers.load(str(path)).encode("return x").tolist() == plain


# ---- long texts ---------------------------------------------------------------------------------


@pytest.mark.core
@given(st.text("ab \n", max_size=60), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_text_and_end_at_line_ends(text: str, size: int) -> None:
    pieces = list(tokenizers.cut(text, size))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= size
    for piece, following in itertools.pairwise(pieces):
        assert piece.endswith("\n") or "\n" not in piece
        assert piece
        if not piece.endswith("\n") and " " in piece[1:]:
            assert following.startswith(" ")


def test_long_texts_are_encoded_in_pieces(bpe, monkeypatch) -> None:
    whole = bpe.encode(TEXT).tolist()
    monkeypatch.setattr(tokenizers, "LONGEST", 1000)
    pieces = list(tokenizers.cut(TEXT, 1000))
    assert len(pieces) > 10
    one_by_one = [i for piece in pieces for i in bpe.encode(piece).tolist()]
    assert bpe.encode_batch(["x", TEXT])[1].tolist() == one_by_one
    # Lines are where this tokenizer cuts as well, so nothing is lost.
    assert one_by_one == whole
    assert bpe.decode(one_by_one) == TEXT


# ---- end tokens and fingerprints ----------------------------------------------------------------


@pytest.mark.parametrize("end", ["</s>", "<eos>", "<|end_of_text|>"])
def test_known_end_tokens_are_found(tmp_path, end: str) -> None:
    tokenizer = tokenizers.load(str(hugging_face(tmp_path, end=end)))
    assert tokenizer.decode([tokenizer.end]) == end


@pytest.mark.parametrize("token", ["def", {"content": "def", "lstrip": False}])
def test_the_config_beside_names_the_end_token(tmp_path, token: object) -> None:
    path = hugging_face(tmp_path)
    first = tokenizers.load(str(path))
    name_end(tmp_path, token)
    tokenizer = tokenizers.load(str(tmp_path))  # the folder will do
    assert tokenizer.decode([tokenizer.end]) == "def"
    assert tokenizer.fingerprint != first.fingerprint


def test_fingerprints_follow_the_content(tmp_path) -> None:
    one, same = hugging_face(tmp_path / "a"), hugging_face(tmp_path / "b")
    other = hugging_face(tmp_path / "c", vocab=390)
    prints = [tokenizers.load(str(path)).fingerprint for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert tokenizers.load("bytes").fingerprint not in prints


def test_tokenizers_travel_to_other_processes(bpe, unigram) -> None:
    for tokenizer in (tokenizers.load("bytes"), bpe, unigram):
        copy = pickle.loads(pickle.dumps(tokenizer))
        assert copy.fingerprint == tokenizer.fingerprint
        assert copy.encode(TEXT).tolist() == tokenizer.encode(TEXT).tolist()


# ---- errors -------------------------------------------------------------------------------------


def test_unknown_names_say_what_would_work(tmp_path) -> None:
    with pytest.raises(DataError, match=r"'gpt2' is no file .* give bytes, .*nothing is downlo"):
        tokenizers.load("gpt2")
    with pytest.raises(DataError, match="did you mean bytes"):
        tokenizers.load("byte")
    with pytest.raises(DataError, match=r"absent/tokenizer\.json' is no file"):
        tokenizers.load(str(tmp_path / "absent" / "tokenizer.json"))
    (tmp_path / "vocab.txt").write_text("a b")
    with pytest.raises(DataError, match=r"vocab\.txt' is neither"):
        tokenizers.load(str(tmp_path / "vocab.txt"))


def test_files_that_are_no_tokenizer_are_named(tmp_path) -> None:
    for name in ("tokenizer.json", "tokenizer.model"):
        path = tmp_path / name
        path.write_text("{}")
        with pytest.raises(DataError, match=f"{name} is not a"):
            tokenizers.load(str(path))


def test_tokenizers_without_an_end_token_are_refused(tmp_path) -> None:
    path = hugging_face(tmp_path / "hf", end=None)
    with pytest.raises(DataError, match=r"none of <\|endoftext\|>, .*tokenizer_config\.json"):
        tokenizers.load(str(path))
    name_end(path.parent, "<stop>")
    with pytest.raises(DataError, match="no token '<stop>'"):
        tokenizers.load(str(path))
    name_end(path.parent, 7)
    with pytest.raises(DataError, match="eos_token is 7"):
        tokenizers.load(str(path))
    (path.parent / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match="not a JSON object"):
        tokenizers.load(str(path))
    model = sentence_piece(tmp_path / "sp", eos_id=-1)
    with pytest.raises(DataError, match="no end-of-sentence piece"):
        tokenizers.load(str(model))


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    path = sentence_piece(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match=r"needs the package sentencepiece: pip install 'jaxpar\["):
        tokenizers.load(str(path))
