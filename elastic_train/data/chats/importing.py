"""Import files of chats into a dataset of tokens and labels, one chat per row, ready for packing.

Rows keep their order and are streamed. Unusable chats are rejected together, by file, row and reason; or skipped and
listed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from elastic_train.data.chats.layouts import (
    KNOWN,
    REMEDY,
    ROLES,
    AnyLayout,
    PreferenceLayout,
    UnfitError,
    layout_of,
    named_layout,
)
from elastic_train.data.chats.rendering import ChatTokenizer, Rendered, last_turn_of, open_tokenizer
from elastic_train.data.corpora import origin
from elastic_train.data.dataset.manifest import SHARE
from elastic_train.data.packing.bins import Tokens
from elastic_train.data.packing.documents import IGNORED, LABELS
from elastic_train.data.tables.encoding import check_utf8
from elastic_train.data.tables.files import Chunk, shown_chunks
from elastic_train.data.tables.images import UnfitRows
from elastic_train.data.tables.importing import (
    TOKENS,
    Parts,
    Table,
    Written,
    contents_of_parts,
    load_parts,
    write_table,
)
from elastic_train.data.tables.objects import Objects, read_objects
from elastic_train.data.tables.writer import ROWS_PER_GROUP
from elastic_train.errors import ConfigError, ElasticTrainError
from elastic_train.system.extras import version_of
from elastic_train.system.progress_bar import Track, silent
from elastic_train.system.wording import counted, did_you_mean, nearest

_NAMES = (TOKENS.name, LABELS)
_PREFERENCE_NAMES = ("chosen_ids", "chosen_labels", "rejected_ids", "rejected_labels")


class UnfitChats(UnfitRows):
    """Chats that cannot be used."""

    remedy = "correct these rows, or leave them out with --skip-unfit"


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of chat imports: columns, tokenizer and template, and the validation share.

    `template` is 'simple' or a Jinja file; None means the tokenizer's own, or the simple one if it has none.
    """

    tokenizer: Path | None = None
    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    template: str | None = None
    max_tokens: int | None = None
    skips: bool = False
    share: float = SHARE
    seed: int = 7
    rows_per_group: int = ROWS_PER_GROUP
    replace: bool = False

    @property
    def are_named(self) -> bool:
        """True if options say that the rows are chats."""
        return any((self.messages_key, self.prompt_key, self.response_key, self.template))


@dataclass(frozen=True, slots=True)
class ImportedChats:
    """Parts of the dataset, lines about how it was made, and the recommended tokens of a packed row; no lines or length
    if the dataset existed already."""

    written: Written
    notes: tuple[str, ...] = ()
    row_length: int = 0


def find_layout(paths: Sequence[Path], options: ChatOptions, text_key: str) -> AnyLayout | None:
    """Return the layout of chats in files, by the first row; None if the rows are not chats.

    Rows are chats if options name their columns, or if there is a tokenizer and no text column for it. Raise
    ConfigError if rows that should be chats, or tokenised, lack the columns.
    """
    if not (options.are_named or options.tokenizer):
        return None
    names = _first_columns(paths)
    if named := named_layout(options.messages_key, options.prompt_key, options.response_key, names):
        return named
    if text_key in names and not options.are_named:
        return None
    if found := layout_of(names):
        return found
    raise ConfigError(
        f"{paths[0]}: row 1 has the columns {', '.join(names)}: no '{text_key}' to tokenise (--text-key), and no chat, "
        f"which is {KNOWN}; {REMEDY}"
    )


def columns_of_texts(paths: Sequence[Path], text_key: str) -> list[str]:
    """Return the columns of the first row of files of texts; raise ConfigError if it is a chat and has no text."""
    try:
        names = [] if paths[0].suffix.lower() == ".txt" else _first_columns(paths)
    except (ElasticTrainError, OSError):
        return []  # who reads the texts says it
    if text_key not in names and layout_of(names):
        raise ConfigError(
            f"{paths[0]}: row 1 has no '{text_key}' and looks like a chat, by its columns {', '.join(names)}: import "
            "chats with `elastic-train data import rows OUT FILES --tokenizer MODEL_FOLDER`, or name a column of texts "
            "with --text-key"
        )
    return names


def _first_columns(paths: Sequence[Path]) -> list[str]:
    for _, row in next(read_objects(paths[:1])).values:
        if isinstance(row, dict):
            return list(row)
    check_utf8(paths[0])
    raise ConfigError(f"{paths[0]}: its first rows are not JSON objects; write one object a line, or an array of them")


def import_chats(
    out: Path, parts: Parts, source: str, layout: AnyLayout, options: ChatOptions, track: Track = silent
) -> ImportedChats:
    """Import files of chats; of a single part, a share is kept for validation."""
    if options.tokenizer is None:
        raise ConfigError("chats need --tokenizer: the folder of the model to be fine-tuned, or a tokenizer.json")
    tokenizer = open_tokenizer(options.tokenizer, options.template)
    made_from = {
        "source": f"{source} of chats",
        "layout": str(layout),
        "tokenizer": tokenizer.digest,
        "max_tokens": options.max_tokens,
        "validation_share": options.share,
        "seed": options.seed,
        "rows_per_group": options.rows_per_group,
        "pyarrow": pa.__version__,
        "transformers": version_of("transformers"),
        **contents_of_parts(parts),
        **({"skip_unfit": True} if options.skips else {}),
    }
    if origin.is_finished(out, made_from, replace=options.replace):
        return ImportedChats(load_parts(out))
    chats = _Chats(layout, tokenizer, options)
    chunks = {name: chats.all(paths, f"reading chats of {name}", track) for name, paths in parts.items()}
    given = tokenizer.given()
    table = Table(chunks, given.facts, chats.schema.names[0], given)
    written = write_table(out, table, made_from, options.share, options.seed, options.rows_per_group, chats.unfit)
    return ImportedChats(written, tuple(chats.notes()), chats.row_length)


class _Chats:
    """Turns rows into tokens and labels, with counts."""

    def __init__(self, layout: AnyLayout, tokenizer: ChatTokenizer, options: ChatOptions) -> None:
        self._layout, self._tokenizer, self._options = layout, tokenizer, options
        self._names = _PREFERENCE_NAMES if isinstance(layout, PreferenceLayout) else _NAMES
        self.schema = pa.schema([TOKENS.with_name(name) for name in self._names])
        self.unfit = UnfitChats(options.skips)
        self._num_turns, self._num_skipped, self._num_cut = 0, 0, 0
        self._num_targets, self._longest = 0, 0
        self._lengths = array("q")
        self._example: str | None = None
        self._unknown_roles: dict[str, str] = {}

    def all(self, paths: Sequence[Path], what: str, track: Track) -> Iterator[Chunk]:
        chunks = (self._chunk(rows) for rows in read_objects(paths))
        yield from shown_chunks(chunks, what, track)

    def notes(self) -> Iterator[str]:
        """Yield lines about targets and template; needs at least one chat."""
        num_tokens = sum(self._lengths)
        yield (
            f"{counted(len(self._lengths), 'chat')} of {self._layout}, {counted(self._num_turns, 'turn')} of the "
            f"assistant, {counted(num_tokens, 'token', ',')}, {self._num_targets / num_tokens:.1%} of them to be "
            f"predicted; the longest chat has {self._longest:,}, 99 of 100 have at most {self._most_lengths:,}"
        )
        yield f"chat template: {self._tokenizer.kind}; the assistant's turns are found by {self._tokenizer.masks}"
        if self._num_cut:
            yield f"{counted(self._num_cut, 'chat')} cut to {self._options.max_tokens:,} tokens"
        if self._num_skipped:
            yield (
                f"{counted(self._num_skipped, 'turn')} of the assistant not learned from: they begin a chat, or the "
                "template writes them otherwise when others follow; one with {% generation %} learns from all "
                "(--chat-template FILE)"
            )
        for role, place in self._unknown_roles.items():
            meant = did_you_mean(nearest(role, sorted(ROLES)))
            yield f"WARNING: {place}: has the role '{role}', which is none of {', '.join(sorted(ROLES))}{meant}"
        if self._example is not None:
            yield f"the first chat, with what is to be predicted in [[ ]]:\n{self._example}"

    @property
    def row_length(self) -> int:
        """The limit of tokens, or else the least power of two that holds 99 of 100 chats whole; at least 64."""
        return self._options.max_tokens or max(64, 1 << (self._most_lengths - 1).bit_length())

    @property
    def _most_lengths(self) -> int:
        """Length in tokens of the 99th percentile chat, as kept."""
        return int(np.percentile(self._lengths, 99, method="lower"))

    def _chunk(self, rows: Objects) -> Chunk:
        found = []
        for number, row in rows.values:
            try:
                found.append(self._rendered(row, f"{rows.path}: row {number}"))
            except UnfitError as error:
                self.unfit.wrong.append(f"{rows.path}: row {number}: {error}")
        columns = [
            pa.array([chats[at // 2][:, at % 2] for chats in found], TOKENS.type) for at in range(len(self._names))
        ]
        return Chunk(rows.path, 0, pa.RecordBatch.from_arrays(columns, schema=self.schema), rows.done)

    def _rendered(self, row: Mapping[str, object] | str, place: str) -> list[Tokens]:
        if isinstance(row, str):
            raise UnfitError(row)
        is_last_alone = isinstance(self._layout, PreferenceLayout)
        chats = self._layout.chats_of(row)
        rendered = [self._tokenizer.render(chat) for chat in chats]
        for role in {message["role"] for chat in chats for message in chat.messages} - ROLES:
            self._unknown_roles.setdefault(role, place)
        return [self._cut(last_turn_of(each) if is_last_alone else each) for each in rendered]

    def _cut(self, rendered: Rendered) -> Tokens:
        tokens = rendered.tokens[: self._options.max_tokens]
        num_targets = int((tokens[1:, 1] != IGNORED).sum())
        if not num_targets:
            if (most := self._options.max_tokens) is None:
                raise UnfitError("has nothing to be predicted after its first token")
            raise UnfitError(f"its first {most:,} tokens have nothing to be predicted; make --max-tokens larger")
        self._count(rendered, len(tokens), num_targets)
        return tokens

    def _count(self, rendered: Rendered, num_kept: int, num_targets: int) -> None:
        if self._example is None:
            self._example = self._tokenizer.shown(rendered)
        self._lengths.append(num_kept)
        self._num_turns += rendered.num_turns
        self._num_skipped += rendered.num_skipped
        self._num_cut += num_kept < len(rendered.tokens)
        self._num_targets += num_targets
        self._longest = max(self._longest, len(rendered.tokens))
