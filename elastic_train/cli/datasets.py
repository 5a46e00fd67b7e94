"""`elastic-train data`: make, describe and verify datasets.

`synth` and the commands of `imports.py` write to a temporary folder and rename it when complete. Repeated with the same
options, they leave a finished dataset unchanged. DATA is a folder or fsspec URL with a manifest, or one with `train/`
and `validation/` in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import fsspec
from cyclopts import App
from rich.text import Text

from elastic_train.cli.imports import Split, report_written
from elastic_train.cli.imports import app as imports
from elastic_train.cli.output import Flag, Json, print_json, print_made, print_table, print_text
from elastic_train.data.corpora import origin, synthetic
from elastic_train.data.dataset import describe, row_lengths, verify
from elastic_train.data.dataset.encoded_images import MOST_MEGAPIXELS, check_images, verify_images
from elastic_train.data.dataset.manifest import NAME, Manifest, load_manifest
from elastic_train.data.packing import pack as packing
from elastic_train.data.packing.pack import Packed, PackOptions, PartReport
from elastic_train.data.parquet.sources import reaching
from elastic_train.errors import ConfigError, DataError
from elastic_train.system.progress_bar import shown
from elastic_train.system.wording import counted, size

app = App(name="data", help="Import, pack, describe and verify datasets.")
app.command(imports)


@app.command
def synth(
    out: str,
    *,
    rows: int = 100_000,
    schema: Literal["quality", "policy"] = "quality",
    seed: int = 0,
    rows_per_group: int = 2048,
    replace: Flag = False,
) -> int:
    """Write synthetic rows with learnable labels to OUT.

    Memory is constant for any number of rows. OUT may be an fsspec URL; only a local folder appears in one step, when
    it is whole.
    """

    def write(url: str) -> Manifest:
        return synthetic.synthesise(url, rows, schema, seed, rows_per_group=rows_per_group, track=shown)

    synthetic.check(rows, schema, seed, rows_per_group)  # before anything is replaced
    if "://" in out:
        _refuse_existing(out, replace=replace)
        return _report_synthetic(out, write(out))
    folder = Path(out)
    made_from = {"source": "synth", "rows": rows, "schema": schema, "seed": seed, "rows_per_group": rows_per_group}
    if origin.is_finished(folder, made_from, replace=replace):
        same = f"the same {counted(rows, 'row', ',')}, schema and seed"
        return print_text(f"{out} already exists, with {same}; nothing to do")
    with origin.filled(folder, made_from) as partial:
        write(str(partial))
    return _report_synthetic(out, load_manifest(out))


@app.command
def pack(
    out: Path,
    sources: list[Path],
    *,
    length: int,
    tokenizer: Path | None = None,
    column: str | None = None,
    end: str | None = None,
    split: Split | None = None,
    open_rows: int = packing.OPEN_ROWS,
    json_: Json = False,
) -> int:
    """Pack documents into rows of at most LENGTH tokens.

    Each document is packed once, and the wasted space is printed. SOURCES are files (.jsonl, .csv, .parquet, .arrow
    with a document in each row; a .txt is one document) or datasets of this project. Rows keep the boundaries of their
    documents, and a column `labels` beside lists of token ids (-100: not to be predicted). Padding that
    `attention_mask` hides is left out. Memory is bounded, whatever the size.

    Parameters
    ----------
    length
        Most tokens of a row; a longer document is cut into whole rows and a rest.
    tokenizer
        Any tokenizer.json, for text; lists of token ids are packed as they are.
    column
        The column to pack; default: `input_ids`, or else `text`.
    end
        A token of the tokenizer, or a token id, to put after each document, such as '<|endoftext|>'.
    open_rows
        Rows that are open for further documents at once: more waste less and take more memory.
    """
    chosen = (split or Split()).checked()
    if length < 1 or open_rows < 1:
        raise ConfigError("--length and --open-rows must be at least 1")
    options = PackOptions(
        length, tokenizer, column, end, chosen.validation_share, chosen.seed, open_rows, chosen.replace
    )
    return _report_packed(out, packing.pack(out, sources, options, track=shown), is_json=json_)


@app.command(name="describe")
def describe_(data: str, *, json_: Json = False) -> int:
    """Show DATA's rows, files, labels, lengths and missing values."""
    facts = [describe.describe(manifest, track=shown) for manifest in _manifests(data)]
    if json_:
        rows = [fact.to_dict() for fact in facts]
        return print_json(rows[0] if len(rows) == 1 else rows)
    for fact in facts:
        _show(fact)
    return 0


_BAR_CELLS = 32


def _show(facts: describe.Description) -> None:
    """Print a description as tables, with shares as bars."""
    names = ("digest", "schema_name", "rows", "files", "row_groups", "vocabulary_size")
    shown = {name.replace("_", " "): getattr(facts, name) for name in names} | {"size": size(facts.size_bytes)}
    print_text(facts.url)
    rows = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in shown.items()]
    print_table(("dataset", ""), rows)
    if facts.labels:
        _print_bars(str(facts.label_column), facts.labels)
    if facts.mean_length is not None:
        _print_bars(f"tokens (mean {facts.mean_length:.1f})", facts.rows_by_length())
    missing = ((name, f"{share:.1%}" if share else "none") for name, share in facts.missing.items())
    print_table(("column", "missing"), missing)


def _print_bars(title: str, counts: Mapping[str, int]) -> None:
    """Print a bar for each count, up to the last that is not zero."""
    used = max((place + 1 for place, count in enumerate(counts.values()) if count), default=0)
    total, largest = max(1, sum(counts.values())), max(counts.values(), default=0) or 1
    rows = [
        (name, f"{count:,}", f"{count / total:.1%}", "█" * round(_BAR_CELLS * count / largest))
        for name, count in list(counts.items())[:used]
    ]
    print_table((title, "rows", "share", ""), rows)


@app.command(name="verify")
def verify_(
    data: str,
    *,
    images: str | None = None,
    max_megapixels: float = MOST_MEGAPIXELS,
    add_checksums: Flag = False,
    add_lengths: str | None = None,
    json_: Json = False,
) -> int:
    """Compare every file of DATA with the manifest.

    Damaged files are listed, and the exit code is 65 if there are any. Damage is named by row group, column and bytes
    where the checksums of the row groups are known.

    Parameters
    ----------
    images
        A column of encoded images: decode all of them, too, in the files that are whole, and list those that cannot be.
    max_megapixels
        Most megapixels of an image, as task.params.max_megapixels.
    add_checksums
        Of a dataset whose manifest was made without: also write checksums of the row groups, so that reading detects
        damage. The manifest stays as it is, and runs continue; a damaged file is named, and nothing is written.
    add_lengths
        A column of lists, such as input_ids, or of lengths: also write the lengths of the rows next to the manifest,
        for `data.length_bucketing`.
    """
    manifests = _manifests(data)
    for manifest in manifests if add_lengths is not None else ():
        made = row_lengths.make_lengths(manifest, add_lengths or "", track=shown)
        if not json_:
            print_text(
                f"{manifest.url}/{row_lengths.NAME}: lengths of {counted(manifest.num_rows, 'row', ',')}, "
                f"from '{made.column}'"
            )
    if add_checksums:
        for manifest in manifests:
            num_sums = verify.add_checksums(manifest, track=shown)
            if not json_:
                print_text(f"{manifest.url}: {num_sums:,} checksums for {len(manifest.group_rows):,} row groups")
    if images is not None:
        for manifest in manifests:
            check_images(manifest, images)
    found = [
        (f"{manifest.url}/{verdict.path}", verdict)
        for manifest in manifests
        for verdict in _verdicts(manifest, images, max_megapixels)
    ]
    _print_verdicts(manifests, found, json_=json_)
    bad = [f"{path} {verdict.wrong}" for path, verdict in found if verdict.wrong]
    if bad and not json_:
        raise DataError("; ".join(bad))
    return DataError.exit_code if bad else 0


def _print_verdicts(manifests: Sequence[Manifest], found: Sequence[tuple[str, verify.Verdict]], *, json_: bool) -> None:
    if json_:
        rows = [(path, one.wrong, [asdict(part) for part in one.damage]) for path, one in found]
        print_json([{"path": path, "wrong": wrong, "damage": damage} for path, wrong, damage in rows])
        return
    verdicts = [(path, Text(one.wrong, "red") if one.wrong else Text("whole", "green")) for path, one in found]
    print_table(("file", "verdict"), verdicts)
    for manifest in (one for one in manifests if not verify.has_checksums(one)):
        print_text(
            f"{manifest.url}: has no checksums of row groups, so training cannot detect damaged data; add them with "
            f"`elastic-train data verify {manifest.url} --add-checksums`"
        )


def _verdicts(manifest: Manifest, images: str | None, most: float) -> Sequence[verify.Verdict]:
    """Return what `verify` says of a dataset, and what is wrong with the images in the files that are whole."""
    verdicts = verify.verify(manifest, track=shown)
    if images is None:
        return verdicts
    damaged = {verdict.path for verdict in verdicts if verdict.wrong}
    return [*verdicts, *verify_images(manifest, images, leaving_out=damaged, most_megapixels=most, track=shown)]


def _manifests(data: str) -> Sequence[Manifest]:
    """Return the manifest at DATA, or those of its train and validation parts."""
    with reaching(data):
        fs, root = fsspec.core.url_to_fs(data)
        is_one = fs.exists(f"{root}/{NAME}")
        parts = [part for part in ("train", "validation") if not is_one and fs.exists(f"{root}/{part}/{NAME}")]
    return [load_manifest(f"{data.rstrip('/')}/{part}") for part in parts] or [load_manifest(data)]


def _report_packed(out: Path, packed: Packed, *, is_json: bool) -> int:
    if is_json:
        return print_json([asdict(report) for report in packed.reports])
    if not packed.is_new:
        return print_text(f"{out} already exists, packed from the same sources with the same options; nothing to do")
    for report in packed.reports:
        print_text(
            f"{report.url}: {counted(report.documents, 'document')} ({report.empty_documents:,} empty, "
            f"{report.cut_documents:,} cut) in {counted(report.rows, 'row')} of {report.length:,} tokens, "
            f"{_targets_of(report)}"
            f"{report.padding_share:.2%} of the room wasted, digest {report.digest[:12]}"
        )
    kind = "lm FOLDER" if packed.reports[0].targets is None else "sft FOLDER --model MODEL_FOLDER"
    return print_made(str(out), f"elastic-train init {kind} --data {shlex.quote(str(out))}")


def _targets_of(report: PartReport) -> str:
    return "" if report.targets is None else f"{report.targets / report.tokens:.2%} of the tokens to be predicted, "


def _report_synthetic(out: str, manifest: Manifest) -> int:
    report_written(manifest)
    return print_made(out, f"elastic-train data describe {shlex.quote(out)}")


def _refuse_existing(url: str, *, replace: bool) -> None:
    with reaching(url):
        fs, root = fsspec.core.url_to_fs(url)
        if fs.exists(root) and fs.ls(root):
            if not replace:
                raise ConfigError(f"{url} is not empty; choose another place, or add --replace")
            fs.rm(root, recursive=True)
