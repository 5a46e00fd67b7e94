"""The tokenizer of a model: from its folder, else from its training data."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from elastic_train.data.corpora.tokenizer import CHAT_TEMPLATE
from elastic_train.data.dataset.manifest import Manifest
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.extras import needed_for
from elastic_train.system.wording import sdk_errors
from elastic_train.tasks.task import Tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
)


@dataclass(frozen=True, slots=True)
class FolderTokenizer:
    """A transformers tokenizer, with the special tokens that it puts before a text and not after, and its template."""

    tokenizer: Any

    def encode_chat(self, message: str) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ConfigError("neither the model's tokenizer nor the data has a chat template: leave --chat out")
        messages = [{"role": "user", "content": message}]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])

    def encode(self, text: str) -> list[int]:
        found = self.tokenizer(text, return_special_tokens_mask=True)
        return _without_end(found["input_ids"], found["special_tokens_mask"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass(frozen=True, slots=True)
class DataTokenizer:
    """A dataset's tokenizer.json, as used for the dataset's rows, but without the tokens that it puts after a text."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        found = self.tokenizer.encode(text)
        return _without_end(found.ids, found.special_tokens_mask)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))


def _without_end(ids: Sequence[int], is_added: Sequence[int]) -> list[int]:
    """Return a text's ids without the tokens that a tokenizer has added after it."""
    num_after = next((at for at, one in enumerate(is_added[::-1]) if not one), 0)
    return list(ids[: len(ids) - num_after])


def tokenizer_of(folder: Path | None, manifest: Manifest) -> Tokenizer | None:
    """Return the tokenizer of a model's folder, else the dataset's; None if neither has one."""
    if folder is not None and any((folder / name).is_file() for name in _FILES):
        with needed_for("a tokenizer of transformers"):
            from transformers import AutoTokenizer
        try:
            found = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: its tokenizer cannot be read: {error}") from error
        if manifest.tokenizer is not None and (template := _read(manifest, CHAT_TEMPLATE)) is not None:
            found.chat_template = template.decode()
        return FolderTokenizer(found)
    if manifest.tokenizer is None:
        return None
    with needed_for("a dataset's tokenizer"):
        import tokenizers
    made = tokenizers.Tokenizer.from_str(_content(manifest).decode())
    made.no_padding()
    made.no_truncation()
    return DataTokenizer(made)


def write_tokenizer(folder: Path | None, manifest: Manifest, target: Path) -> None:
    """Write the tokenizer of a model's folder, else the dataset's, into a folder for AutoTokenizer.

    The chat template is the dataset's, with which the model was trained, if there is one.
    """
    files = [folder / name for name in _FILES if (folder / name).is_file()] if folder is not None else []
    for file in files:
        shutil.copyfile(file, target / file.name)
    if manifest.tokenizer is None:
        return
    if not files:
        import tokenizers
        import transformers

        found = tokenizers.Tokenizer.from_str(_content(manifest).decode())
        transformers.PreTrainedTokenizerFast(tokenizer_object=found).save_pretrained(target)
    if (template := _read(manifest, CHAT_TEMPLATE)) is not None:
        (target / CHAT_TEMPLATE).write_bytes(template)


def _content(manifest: Manifest) -> bytes:
    name = manifest.tokenizer or ""
    if (content := _read(manifest, name)) is None:
        raise DataError(f"{manifest.url.rstrip('/')}/{name}: is not there")
    return content


def _read(manifest: Manifest, name: str) -> bytes | None:
    """Return a file next to a manifest, None if missing; raise DataError if it cannot be read."""
    where = f"{manifest.url.rstrip('/')}/{name}"
    try:
        with fsspec.open(where, "rb") as file:
            content: bytes = file.read()
    except FileNotFoundError:
        return None
    except sdk_errors(OSError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from error
    return content
