"""The tokeniser and the measures of a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from elastic_train.data.corpora.origin import measure
from elastic_train.data.corpora.tokenizer import PADDING, encode, train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "def cat(dog): return the_mat"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokeniser of a few texts."""
    return train_tokenizer(TEXTS, 275)


@pytest.mark.heavy
@given(st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """Bytes are the alphabet, so a text that was never seen decodes to itself, and holds no padding."""
    (ids,) = encode(tokenizer, [text], 10**6)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [id_ for id_ in ids if not 0 < id_ < 275] == []


def test_a_lone_surrogate_damages_nothing_else(tokenizer: Tokenizer) -> None:
    """JSON may hold the first of an emoji's two codes without the second: UTF-8 cannot."""
    (ids,) = encode(train_tokenizer([*TEXTS, "cut \ud83d"], 275), ["the cat \ud83d"], 10**6)
    assert tokenizer.decode(ids) == "the cat ?"


def test_a_text_that_spells_the_padding_is_text(tokenizer: Tokenizer) -> None:
    """Id 0 occurs in no text, also where a text is about padding."""
    text = f"pad with {PADDING}, then cut"
    (ids,) = encode(tokenizer, [text], 100)
    assert ids.count(0) == 0
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_same_texts_give_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    """Training is a function of the texts and their order."""
    assert train_tokenizer(iter(TEXTS), 275).to_str() == tokenizer.to_str()


def test_vocabulary_is_a_bound(tokenizer: Tokenizer) -> None:
    """Few texts give fewer ids than allowed; merged words take fewer ids than they have letters."""
    assert tokenizer.get_vocab_size() == 275
    assert train_tokenizer(["ab"], 8192).get_vocab_size() == 258
    assert len(encode(tokenizer, ["the cat sat"], 100)[0]) < len("the cat sat") // 2


def test_texts_are_cut_off(tokenizer: Tokenizer) -> None:
    """The first tokens are kept; an empty text has none."""
    (whole,) = encode(tokenizer, [TEXTS[2]], 100)
    assert encode(tokenizer, [TEXTS[2], "", TEXTS[2]], 3) == [whole[:3], [], whole[:3]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (0.0, 0.0, 0.0)),
        ("plain words", (11.0, 1.0, 0.0)),
        ("words\n\n>>> f(1)\n1", (17.0, 3.0, 1 / 3)),
        ("def f():\n    return 1", (21.0, 2.0, 1.0)),
        ("        deep", (12.0, 1.0, 1.0)),
    ],
)
def test_measures_of_a_text(text: str, expected: tuple[float, float, float]) -> None:
    """Characters, lines that are not blank, and the share of those that look like code."""
    assert measure(text) == expected
