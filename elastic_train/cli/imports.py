"""`elastic-train data import`: make datasets from text, rows and images.

Each writes to a temporary folder and renames it when complete. Repeated with the same options and sources, it leaves a
finished dataset unchanged.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from elastic_train.cli.output import Flag, print_made, print_text
from elastic_train.data.chats.importing import ChatOptions, columns_of_texts, find_layout, import_chats
from elastic_train.data.chats.layouts import PreferenceLayout, layout_of
from elastic_train.data.dataset.encoded_images import MOST_MEGAPIXELS
from elastic_train.data.dataset.manifest import SHARE, TRAIN, VALIDATION, Manifest
from elastic_train.data.tables import digits as handwritten
from elastic_train.data.tables import hf_folder, image_folder, importing
from elastic_train.data.tables import texts as corpora
from elastic_train.data.tables.files import parse_types
from elastic_train.data.tables.images import ImageCheck
from elastic_train.data.tables.importing import RowOptions, Written
from elastic_train.data.tables.labels import misspelt
from elastic_train.data.tables.texts import Options
from elastic_train.errors import ConfigError
from elastic_train.system.progress_bar import shown
from elastic_train.system.wording import counted

app = App(name="import", help="Make OUT/train and OUT/validation from text, rows or images.")

Names = Annotated[tuple[str, ...], Parameter(consume_multiple=True, show_default=False)]
Held = Annotated[
    tuple[Path, ...],
    Parameter(
        consume_multiple=True, show_default=False, help="Your own files for validation; default: a share of FILES."
    ),
]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Chosen:
    """Options of imports of text."""

    seed: int = corpora.DEFAULTS.seed
    "Seed of the split, the row order and the choice of docstrings."
    vocabulary: int = corpora.DEFAULTS.vocabulary
    "Size of the byte-level BPE tokeniser's vocabulary."
    max_tokens: int = corpora.DEFAULTS.max_tokens
    "Maximum number of tokens of a text; longer texts are truncated."
    replace: Flag = False
    "Replace whatever is in OUT."

    def options(self, samples: int = corpora.DEFAULTS.num_samples) -> Options:
        least = {
            "samples": (samples, 2),
            "vocabulary": (self.vocabulary, 512),
            "max-tokens": (self.max_tokens, 1),
            "seed": (self.seed, 0),
        }
        wrong = [f"--{name} must be at least {limit}" for name, (value, limit) in least.items() if value < limit]
        if wrong:
            raise ConfigError(*wrong)
        return Options(samples, self.seed, self.vocabulary, self.max_tokens, self.replace)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Split:
    """Options of imports that keep a share of the rows for validation."""

    validation_share: float = SHARE
    "Share of the rows to keep for validation, by their content; 0 for none. Ignored if validation rows are given."
    seed: int = 7
    "Seed of the split and of the order of images."
    replace: Flag = False
    "Replace whatever is in OUT."

    def checked(self) -> Split:
        if not 0 <= self.validation_share < 1:
            raise ConfigError("--validation-share must be at least 0 and less than 1")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError("--seed must be at least 0 and below 2^64")
        return self


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Images:
    """Options of imports of images."""

    skip_corrupt: Flag = False
    "Leave out images that do not decode, and list them."
    max_megapixels: float = MOST_MEGAPIXELS
    "Largest image in megapixels; task.params.max_megapixels is the limit in training."

    def check(self) -> ImageCheck:
        if not self.max_megapixels > 0:
            raise ConfigError("--max-megapixels must be greater than 0")
        return ImageCheck(self.skip_corrupt, most_megapixels=self.max_megapixels)


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Columns:
    """Options of imports of rows."""

    label_key: str | None = None
    "Column of labels: names, which are numbered by frequency, or whole numbers; default: 'label' if there is one."
    text_key: str = "text"
    "Column of text to tokenise, with --tokenizer."
    tokenizer: Path | None = None
    "A model's folder, or any tokenizer.json: the text column, or the chat, becomes `input_ids`."
    max_tokens: int | None = None
    "Maximum number of tokens of a text or chat; default: no limit."
    numeric: Names = ()
    "Columns of numbers that tasks take as metadata by default."
    categorical: Names = ()
    "Columns of categories that tasks take as metadata by default."
    types: Names = ()
    "Types of columns, such as score=float64, where the first rows do not show them."

    def options(self, split: Split) -> RowOptions:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("--max-tokens must be at least 1")
        return RowOptions(
            self.label_key,
            self.text_key,
            self.tokenizer,
            self.max_tokens,
            self.numeric,
            self.categorical,
            parse_types(self.types),
            split.validation_share,
            split.seed,
            replace=split.replace,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class Chats:
    """Options of imports of chats, which rows are that have no text column, with --tokenizer."""

    messages_key: str | None = None
    "Column of messages, lists of {role, content} or {from, value}; default: found by its name."
    prompt_key: str | None = None
    "Column of prompts, in place of messages."
    response_key: str | None = None
    "Column of the responses to --prompt-key."
    chat_template: str | None = None
    "A Jinja file, or simple; default: the tokenizer's own, or simple if it has none."
    skip_unfit: Flag = False
    "Leave out chats that cannot be used, and list them."

    def options(self, columns: Columns, split: Split) -> ChatOptions:
        rows = columns.options(split)
        return ChatOptions(
            rows.tokenizer,
            self.messages_key,
            self.prompt_key,
            self.response_key,
            self.chat_template,
            rows.max_tokens,
            self.skip_unfit,
            rows.share,
            rows.seed,
            replace=rows.replace,
        )


MOST_LABELS = 12
_KINDS = {"jsonl": (".jsonl", ".json"), "csv": (".csv", ".tsv")}
"""Suffixes of files of rows, by their kind."""


@app.command(name="docstrings")
def import_docstrings(
    out: Path,
    *,
    samples: int = corpora.DEFAULTS.num_samples,
    chosen: Chosen | None = None,
    site_packages: Path | None = None,
) -> int:
    """Import the docstrings of the installed libraries.

    The label is the library. Nothing is downloaded or executed.

    Parameters
    ----------
    samples
        Samples to take.
    site_packages
        Folder to read the libraries from; default: the running interpreter's.
    """
    options = (chosen or Chosen()).options(samples)
    return _report_new(out, corpora.import_docstrings(out, options, site_packages=site_packages, track=shown))


@app.command(name="text")
def import_text(
    out: Path,
    files: list[Path],
    *,
    validation: Held = (),
    chosen: Chosen | None = None,
    text_key: str = "text",
    label_key: str = "label",
    skip_unfit: Flag = False,
) -> int:
    """Import text FILES, and train a tokenizer on them.

    FILES are .jsonl or .csv with a text and a label in each row, or .txt named after the label. --skip-unfit leaves out
    rows without a text or a label, and lists them. Other columns are not kept: `import rows` does that.
    """
    options = replace((chosen or Chosen()).options(), skips=skip_unfit)
    columns = columns_of_texts(files, text_key)
    parts = {TRAIN: files, **({VALIDATION: validation} if validation else {})}
    made = corpora.import_text(out, parts, options, text_key=text_key, label_key=label_key, track=shown)
    if made.is_new and (others := [name for name in columns if name not in (text_key, label_key)]):
        print_text(f"not kept: {', '.join(others)} (`import rows` with --tokenizer keeps all columns)")
    return _report_new(out, made, "row")


@app.command(name="rows")
def import_rows(
    out: Path,
    files: list[Path],
    *,
    validation: Held = (),
    columns: Columns | None = None,
    chats: Chats | None = None,
    split: Split | None = None,
) -> int:
    """Import rows of any fields, or chats, from FILES.

    All FILES are of one kind and are read as a stream, so they may have any size. JSON lines (.jsonl, .json) have one
    object a line, with the same fields in all; tables (.csv with commas, .tsv with tabs) have a header. With
    --tokenizer and no column of text, rows are chats: messages, or a prompt and its response, become tokens, and labels
    of the assistant's turns alone. `data pack` packs them.
    """
    source = next((kind for kind, suffixes in _KINDS.items() if files[0].suffix.lower() in suffixes), None)
    if source is None:
        raise ConfigError(f"{files[0]}: must be .jsonl, .json, .csv or .tsv")
    wrong = [path for path in (*files, *validation) if path.suffix.lower() not in _KINDS[source]]
    if wrong:
        raise ConfigError(*(f"{path}: must be {' or '.join(_KINDS[source])}" for path in wrong))
    options = (columns or Columns()).options((split or Split()).checked())
    parts = {TRAIN: files, **({VALIDATION: validation} if validation else {})}
    if (done := _import_chats(out, parts, source, columns or Columns(), chats, split)) is not None:
        return done
    return _report_new(out, importing.import_rows(out, parts, source, options, track=shown))


@app.command(name="hf-folder")
def import_hf_folder(
    out: Path,
    folder: Path,
    *,
    columns: Columns | None = None,
    chats: Chats | None = None,
    split: Split | None = None,
    images: Images | None = None,
) -> int:
    """Import a Hugging Face dataset from FOLDER.

    FOLDER was written by `save_to_disk`, or is a clone of the dataset's repository. Its splits `train` and `validation`
    are kept; without the second, a share of the first validates. With --tokenizer and no column of text, rows are
    chats, as in `import rows`.
    """
    chosen = columns or Columns()
    options = replace(chosen.options((split or Split()).checked()), images=(images or Images()).check())
    parts = hf_folder.parts_of(folder)
    print_text(hf_folder.taken_from(folder))
    if (done := _import_chats(out, parts, "hf-folder", chosen, chats, split)) is not None:
        return done
    return _report_new(out, hf_folder.import_hf_folder(out, folder, options, track=shown))


@app.command(name="images")
def import_images(
    out: Path,
    folder: Path | None = None,
    *,
    digits: Flag = False,
    split: Split | None = None,
    images: Images | None = None,
) -> int:
    """Import images from FOLDER/LABEL/FILE, or FOLDER/FILE.

    Those of FOLDER/FILE have no labels, for `predict`. FOLDER/train/LABEL/FILE and FOLDER/validation/… set the split.
    Every image is decoded once, and those that do not decode are refused by name. The table stores its bytes as they
    are. --digits: in place of a FOLDER, scikit-learn's 1,797 handwritten digits of 8 x 8 pixels; nothing is downloaded.
    """
    chosen, check = (split or Split()).checked(), (images or Images()).check()
    if digits == (folder is not None):
        raise ConfigError("name a FOLDER of images, or give --digits")
    if folder is None:
        made = handwritten.import_digits(out, share=chosen.validation_share, seed=chosen.seed, replace=chosen.replace)
        return _report_new(out, made)
    made = image_folder.import_images(
        out, folder, share=chosen.validation_share, seed=chosen.seed, replace=chosen.replace, check=check, track=shown
    )
    return _report_new(out, made)


def _import_chats(
    out: Path, parts: importing.Parts, source: str, columns: Columns, chats: Chats | None, split: Split | None
) -> int | None:
    """Import rows that are chats, and return the exit code; None for other rows."""
    options = (chats or Chats()).options(columns, split or Split())
    layout = find_layout(parts[TRAIN], options, columns.text_key)
    if layout is None:
        return None
    made = import_chats(out, parts, source, layout, options, track=shown)
    _report_new(out, made.written, "chat")
    for note in made.notes:
        print_text(note)
    if made.written.is_new:
        source, packed = shlex.quote(str(out)), shlex.quote(f"{out}-packed")
        if isinstance(layout, PreferenceLayout):
            then = f"data.train: {out}/train, and task.path: elastic_train.tasks.preferences:Preferences"
        else:
            then = f"elastic-train data pack {packed} {source} --length {made.row_length}"
        print_made(str(out), then)
    return 0


def _report_new(out: Path, made: Written, noun: str = "image") -> int:
    if made.left_out:
        print_text("\n".join(f"left out: {line}" for line in made.left_out))
        print_text(f"{counted(len(made.left_out), noun)} left out")
    found = made.manifests[0]
    is_of_chats = layout_of([*found.columns]) is not None
    _report(out, made.manifests, is_new=made.is_new, ends=noun != "chat" and not is_of_chats)
    if is_of_chats:
        add = (
            "--tokenizer MODEL_FOLDER"
            if found.tokenizer is None
            else "--messages-key, or --prompt-key and --response-key"
        )
        print_text(
            f"these rows look like chats, and {out} holds them as they are: to train on them, repeat this with "
            f"--replace {add}"
        )
    return 0


def _report(out: Path, manifests: Sequence[Manifest], *, is_new: bool, ends: bool = True) -> int:
    """Print a line for each dataset and, unless the caller prints more, the next command."""
    if not is_new:
        return print_text(f"{out} already exists, made from the same sources and options; nothing to do")
    for manifest in manifests:
        report_written(manifest)
    counts = dict(zip(manifests[0].labels or (), manifests[0].label_counts or (), strict=False))
    for name, meant in misspelt(counts):
        print_text(f"WARNING: is the label '{name}' meant to be '{meant}'? Then correct its rows, and add --replace")
    if ends:
        print_made(str(out), _next_for(manifests[0], shlex.quote(str(out))))
    return 0


def _next_for(train: Manifest, out: str) -> str:
    """Return the next command for a dataset; rows without labels may be there to predict them."""
    columns, is_labelled = [*train.columns], train.label_column is not None
    predict = f"elastic-train predict RUN --data {out}/train --out FILE"
    if "image" in columns and not is_labelled:
        return predict
    if "image" in columns or "input_ids" in columns:
        kind = "images" if "image" in columns else "text" if is_labelled else "lm"
        then = f"elastic-train init {kind} FOLDER --data {out}"
    else:
        then = f"elastic-train data describe {out}, and a task that takes {', '.join(columns)}"
    return then if is_labelled else f"{then}; or {predict}"


def report_written(manifest: Manifest) -> int:
    """Print the size of a new dataset, the rows of each class unless there are many, and the digest."""
    counts, labels = manifest.label_counts, ""
    if counts is not None:
        named = [f"{name} {count:,}" for name, count in zip(manifest.labels or range(len(counts)), counts, strict=True)]
        of_each = f" ({', '.join(named)})" if len(named) <= MOST_LABELS else ""
        labels = f"{counted(len(named), 'label')}{of_each}, "
    return print_text(
        f"{manifest.url}: {counted(manifest.num_rows, 'row', ',')} in {counted(len(manifest.files), 'file')}, "
        f"{labels}digest {manifest.digest[:12]}"
    )
