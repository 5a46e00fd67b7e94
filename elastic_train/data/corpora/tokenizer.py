"""Tokenisers: byte-level BPE trained on the training part and stored with the data, or a given file.

In one trained here, id 0 is padding and never occurs in a text; the same texts in the same order give the same
tokenizer.json.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from elastic_train.errors import ConfigError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import did_you_mean, nearest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE_NAME, CHAT_TEMPLATE = "tokenizer.json", "chat_template.jinja"
VOCABULARY = 8192
PADDING = "<pad>"


def version() -> str:
    """Return the version of the package `tokenizers`; raise ConfigError if it is not installed."""
    with needed_for("importing text"):
        import tokenizers
    return str(tokenizers.__version__)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train a byte-level BPE of at most `vocabulary` ids. Raise ConfigError without `tokenizers`."""
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
    """Return the ids of each text, truncated to `max_tokens`; the padding token's spelling is ordinary text."""
    tokenizer.encode_special_tokens = True
    encodings = tokenizer.encode_batch_fast(list(map(_whole, texts)), add_special_tokens=False)
    return [encoding.ids[:max_tokens] for encoding in encodings]


@dataclass(frozen=True, slots=True)
class GivenTokenizer:
    """A given tokenizer.json: its bytes, the tokenizer, and a chat template."""

    content: bytes
    tokenizer: Tokenizer
    chat_template: str | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def facts(self) -> dict[str, object]:
        """Tokenizer fields of a dataset's manifest."""
        return {"tokenizer": FILE_NAME, "tokenizer_sha256": self.sha256, "vocabulary_size": self.vocabulary_size}

    def write_to(self, folder: Path) -> None:
        """Write the tokenizer, and the template if any, into a dataset's folder."""
        (folder / FILE_NAME).write_bytes(self.content)
        if self.chat_template is not None:
            (folder / CHAT_TEMPLATE).write_text(self.chat_template)

    def id_of(self, token: str) -> int:
        """Return a token's id; raise ConfigError with the nearest token if it does not exist."""
        found = self.tokenizer.token_to_id(token)
        if found is None:
            meant = nearest(token, self.tokenizer.get_vocab(with_added_tokens=True))
            raise ConfigError(f"the tokenizer has no token '{token}'{did_you_mean(meant)}")
        return int(found)

    def ids_of(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of whole texts, including tokens that the tokenizer adds, such as a beginning-of-text token.

        The spelling of a special token is ordinary text.
        """
        encodings = self.tokenizer.encode_batch_fast(list(map(_whole, texts)), add_special_tokens=True)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a model's folder, or any other path unchanged."""
    return path / FILE_NAME if path.is_dir() else path


def read_tokenizer(path: Path) -> GivenTokenizer:
    """Read a tokenizer.json, or that of a model's folder, without its padding and truncation.

    Raise ConfigError if it is not one.
    """
    with needed_for("a tokenizer"):
        from tokenizers import Tokenizer
    path = tokenizer_file(path)
    try:
        content = path.read_bytes()
        template = path.with_name(CHAT_TEMPLATE)
        chat_template = template.read_text() if template.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:
        raise ConfigError(f"{path}: is not a tokenizer.json: {error}; name the file of that name of a model") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return GivenTokenizer(content, tokenizer, chat_template)


def _whole(text: str) -> str:
    """Return a text with ? for lone surrogates, which JSON and Python can write and UTF-8 cannot."""
    return text.encode(errors="replace").decode()
