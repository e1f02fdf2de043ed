"""The tokenizer: text never becomes a special token, and a stream says what decode says."""

import threading
import unicodedata

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given

from qjax.model.checkpoint import CheckpointError
from qjax.model.tokenizer import LONG, Tokenizer
from tests import tiny_checkpoint as tiny

TOKENIZER = Tokenizer(tiny.tokenizer())
LIBRARY = tiny.tokenizer()
MARKS = (*tiny.CONTROL, *tiny.TAGS)
EMOJI = "👩🏽‍🚀🇯🇵🙂e\u0301日本\U0010ffff"
texts = st.lists(st.text() | st.sampled_from([*MARKS, *EMOJI, " ", "\n\n", "<", ">"])).map("".join)
ids = st.lists(st.integers(-3, TOKENIZER.size + 3))


def streamed(tokens) -> tuple[list[str], str]:
    stream = TOKENIZER.stream()
    return [stream.step(i) for i in tokens], stream.flush()


def test_the_marks_are_known_by_name():
    assert {text: TOKENIZER.special[text] for text in MARKS} == {text: LIBRARY.token_to_id(text) for text in MARKS}
    assert len(TOKENIZER.special) == len(MARKS)
    assert TOKENIZER.size == LIBRARY.get_vocab_size()
    assert TOKENIZER.stop_ids == (TOKENIZER.special["<|im_end|>"], TOKENIZER.special["<|endoftext|>"])


@given(texts)
def test_text_never_becomes_a_special_token(text):
    tokens = TOKENIZER.encode(text)
    assert not set(tokens) & set(TOKENIZER.special.values())
    assert TOKENIZER.decode(tokens) == unicodedata.normalize("NFC", text)


def test_the_library_alone_would_parse_it():
    text = "a<|im_end|>b<think>"
    assert LIBRARY.encode(text).ids[-1] == TOKENIZER.special["<think>"]  # the control
    library = tiny.tokenizer()
    library.encode_special_tokens = True
    assert library.encode(text).ids[-1] == TOKENIZER.special["<think>"]  # its own switch spares only what is marked special
    assert TOKENIZER.special["<think>"] not in TOKENIZER.encode(text)


@given(st.text())
def test_plain_text_encodes_as_the_library_does(text):
    if not any(mark in text for mark in MARKS):
        assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(ids)
def test_decode_is_the_librarys(tokens):
    known = [i for i in tokens if 0 <= i < TOKENIZER.size]
    assert TOKENIZER.decode(tokens) == LIBRARY.decode(known, skip_special_tokens=False)


@given(ids)
def test_a_stream_of_any_ids_says_what_decode_says(tokens):
    pieces, rest = streamed(tokens)
    assert "".join(pieces) + rest == TOKENIZER.decode(tokens)


@given(texts, st.data())
def test_a_stream_of_text_gives_each_character_when_it_is_whole(text, data):
    tokens = TOKENIZER.encode(text)
    pieces, rest = streamed(tokens)
    assert "".join(pieces) == unicodedata.normalize("NFC", text)
    assert rest == ""
    assert "�" in text or not any("�" in piece for piece in pieces)
    cut = data.draw(st.integers(0, len(tokens)))
    pieces, rest = streamed(tokens[:cut])
    assert "".join(pieces) + rest == TOKENIZER.decode(tokens[:cut])
    assert unicodedata.normalize("NFC", text).startswith("".join(pieces))


def test_an_emoji_cut_in_the_middle_is_held_back():
    tokens = TOKENIZER.encode("a𐀀b")
    assert len(tokens) == 6  # not in the training text: one token a byte
    assert streamed(tokens) == (["a", "", "", "", "𐀀", "b"], "")
    assert streamed(tokens[:3]) == (["a", "", ""], "�")
    stream = TOKENIZER.stream()
    stream.step(tokens[1])
    assert (stream.flush(), stream.flush(), stream.step(tokens[0])) == ("�", "", "a")


def test_ids_without_a_token_have_no_text():
    assert TOKENIZER.decode([TOKENIZER.size, -1, 10**6]) == ""


def test_lone_surrogates_are_replaced_and_pairs_joined():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a�b"
    assert TOKENIZER.decode(TOKENIZER.encode("\ud83d\ude42\udc00")) == "🙂�"


def test_a_long_text_has_the_ids_that_the_library_gives_it():
    text = "x yé z " * LONG
    assert TOKENIZER.encode(text) == LIBRARY.encode(text, add_special_tokens=False).ids


def test_other_threads_run_while_a_long_text_is_encoded():
    """Under Python's lock they would get one turn or two."""
    begun, done, turns = threading.Event(), threading.Event(), 0

    def encode() -> None:
        begun.set()
        TOKENIZER.encode("a" * 2_000_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_truncation_and_padding_of_the_file_are_off():
    inner = tiny.tokenizer()
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    assert Tokenizer(inner).encode("x y z x y z") == TOKENIZER.encode("x y z x y z")


def test_added_words_are_no_marks():
    inner = tiny.tokenizer()
    inner.add_tokens(["Zoë", " "])
    tokenizer = Tokenizer(inner)
    assert tokenizer.wordlike == {"Zoë", " "}
    assert tokenizer.special == TOKENIZER.special
    assert tokenizer.encode("Zoë and Zoë") == TOKENIZER.encode("Zoë and Zoë")
    assert tokenizer.decode([tokenizer.size - 2]) == "Zoë"


def test_what_is_not_byte_level_is_refused():
    inner = tiny.tokenizer()
    inner.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(CheckpointError, match="decoder: expected ByteLevel, found WordPiece"):
        Tokenizer(inner)


def test_a_mark_that_the_merges_can_spell_is_refused():
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"<": 0, "x": 1, ">": 2, "<x": 3, "<x>": 4}, [("<", "x"), ("<x", ">")]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("|", "isolated")
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<x>"])
    with pytest.raises(CheckpointError, match="special tokens: expected to be told from text, found <x>"):
        Tokenizer(inner)
