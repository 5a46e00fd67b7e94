"""The tokeniser: byte-level BPE, trained on the training part alone and stored beside the data.

Id 0 is padding and never occurs in a text. The same texts in the same order give the same tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from elastic_train.system.extras import needed_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME = "tokenizer.json"
VOCABULARY = 8192
PADDING = "<pad>"


def version() -> str:
    """Return the version of the package `tokenizers`; ConfigError if it is not installed."""
    with needed_for("importing text"):
        import tokenizers
    return str(tokenizers.__version__)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` ids; small texts give fewer. ConfigError without `tokenizers`."""
    with needed_for("importing text"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_whole, texts), trainer)
    assert tokenizer.token_to_id(PADDING) == 0, "padding is id 0"
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
    """Return the ids of each text, cut off at `max_tokens`; a text that spells the padding is text like any other."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(map(_whole, texts)), add_special_tokens=False)
    return [encoding.ids[:max_tokens] for encoding in encodings]


def _whole(text: str) -> str:
    """Return a text with ? for halves of characters, which JSON and Python can write and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
