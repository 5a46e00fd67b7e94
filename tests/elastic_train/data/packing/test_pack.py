"""`data pack`: files and datasets become rows whose documents can be told apart, each of them there once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.data.corpora.tokenizer import train_tokenizer
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.data.packing.bins import BestFit
from elastic_train.data.packing.pack import PackOptions, pack, read_back, written
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.data.tables.writer import ROWS_PER_GROUP
from elastic_train.errors import ConfigError
from elastic_train.tasks.rows.token_rows import TokenColumns
from tests.conftest import write_rows

WORDS = ("tree", "sum", "lane", "step", "rank", "world")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that asks for padding and truncation, as those of models often do."""
    made = train_tokenizer(WORDS, 300)
    made.add_special_tokens(["<end>"])
    made.enable_truncation(4)
    made.enable_padding(length=16)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def write_documents(path: Path, num_documents: int) -> list[str]:
    texts = [
        " ".join(WORDS[at * 7 % 6] for at in range(number % 23)) + f"{number}" * (number % 23 > 0)
        for number in range(num_documents)
    ]
    path.write_text("".join(json.dumps({"text": text, "n": number}) + "\n" for number, text in enumerate(texts)))
    return texts


def documents_in(folder: Path) -> list[tuple[int, list[int]]]:
    """Return number and tokens of every document of a part, put together from its pieces."""
    pieces = []
    for path in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            runs = [
                list(run) for _, run in groupby(zip(row["document_ids"], row["input_ids"], strict=True), itemgetter(0))
            ]
            for run, offset in zip(runs, row["document_offsets"], strict=True):
                pieces.append((run[0][0], offset, [token for _, token in run]))
    found: dict[int, list[int]] = {}
    for number, offset, tokens in sorted(pieces):
        assert len(found.setdefault(number, [])) == offset
        found[number] += tokens
    return sorted(found.items())


def test_every_text_is_in_one_part_once_with_its_end(tmp_path: Path, tokenizer: Path) -> None:
    """The tokenizer's own padding and truncation are left out; empty documents are counted, long ones cut."""
    texts = write_documents(tmp_path / "a.jsonl", 400)
    options = PackOptions(32, tokenizer, end="<end>", num_open=4)
    made = pack(tmp_path / "out", [tmp_path / "a.jsonl"], options)
    manifests = [load_manifest(str(tmp_path / "out" / part)) for part in ("train", "validation")]
    from tokenizers import Tokenizer

    coder = Tokenizer.from_str(tokenizer.read_text())
    found = [tokens for part in ("train", "validation") for _, tokens in documents_in(tmp_path / "out" / part)]
    end = coder.token_to_id("<end>")
    assert {tokens[-1] for tokens in found} == {end}
    assert Counter(coder.decode(tokens[:-1]) for tokens in found) == Counter(text for text in texts if text)
    assert sum(report.documents for report in made.reports) == len(texts)
    assert sum(report.empty_documents for report in made.reports) == texts.count("")
    assert sum(report.cut_documents for report in made.reports) == sum(len(tokens) > 32 for tokens in found) > 0
    for report, manifest in zip(made.reports, manifests, strict=True):
        assert (report.digest, report.rows) == (manifest.digest, manifest.num_rows)
        assert report.padding_share == pytest.approx(1 - report.tokens / (32 * report.rows))
        assert (manifest.vocabulary_size, manifest.tokenizer) == (coder.get_vocab_size(), "tokenizer.json")


def test_a_dataset_is_packed_part_by_part(tmp_path: Path) -> None:
    """Of tokens as they are: training stays training; the same again changes nothing, and other options are refused."""
    write_rows(tmp_path / "data" / "train", 50, seed=1)
    write_rows(tmp_path / "data" / "validation", 20, seed=2)
    made = pack(tmp_path / "out", [tmp_path / "data"], PackOptions(64))
    assert [report.documents for report in made.reports] == [50, 20]
    assert load_lengths(load_manifest(made.reports[0].url)).longest == 64
    for part in ("train", "validation"):
        rows = pa.concat_tables(map(pq.read_table, sorted((tmp_path / "data" / part).glob("*.parquet"))))
        assert documents_in(tmp_path / "out" / part) == list(enumerate(rows["input_ids"].to_pylist()))
    assert not pack(tmp_path / "out", [tmp_path / "data"], PackOptions(64)).is_new
    with pytest.raises(ConfigError, match=r"made differently \(length\)"):
        pack(tmp_path / "out", [tmp_path / "data"], PackOptions(65))


def test_tokens_of_several_tokenizers_are_not_packed_together(tmp_path: Path, tokenizer: Path) -> None:
    write_documents(tmp_path / "a.jsonl", 40)
    train_tokenizer(WORDS[:2], 300).save(str(tmp_path / "other.json"))
    for name, path in (("a", tokenizer), ("b", tokenizer), ("c", tmp_path / "other.json")):
        import_rows(tmp_path / name, {"train": [tmp_path / "a.jsonl"]}, "jsonl", RowOptions(tokenizer=path, share=0))
    a, b, c = (tmp_path / name / "train" for name in "abc")
    assert pack(tmp_path / "same", [a, b], PackOptions(64)).is_new
    with pytest.raises(ConfigError, match=r"c/train/tokenizer\.json: is another tokenizer than .*a/train/tokenizer"):
        pack(tmp_path / "out", [a, b, c], PackOptions(64))


def test_what_is_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document that does not reach the files is noticed, and nothing is left at the target."""
    write_rows(tmp_path / "data", 50)
    finish = BestFit.finish
    monkeypatch.setattr(BestFit, "finish", lambda bins: finish(bins)[1:])
    with pytest.raises(AssertionError, match="a document, or a label, is lost or repeated"):
        pack(tmp_path / "out", [tmp_path / "data"], PackOptions(64, share=0))
    assert not (tmp_path / "out").exists()


def test_what_is_read_back_is_read_in_pieces(tmp_path: Path) -> None:
    """The proof takes no more memory than packing did, however large the rows."""
    pq.write_table(pa.table({"input_ids": pa.array([[1]] * 2000, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    pack(tmp_path / "out", [tmp_path / "a.parquet"], PackOptions(1, share=0))
    sizes = [rows.num_rows for rows in read_back(tmp_path / "out" / "train")]
    assert sum(sizes) == 2000 and max(sizes) <= ROWS_PER_GROUP


def test_the_sums_count_documents_not_pieces(tmp_path: Path) -> None:
    pa_rows = pa.table({"input_ids": pa.array([list(range(25)), [7]], pa.list_(pa.int32()))})
    pq.write_table(pa_rows, tmp_path / "a.parquet")
    pack(tmp_path / "out", [tmp_path / "a.parquet"], PackOptions(10, share=0))
    sums, num_tokens, num_targets = written(tmp_path / "out" / "train")
    assert (sums.count, num_tokens, num_targets) == (2, 26, None)


def labelled(path: Path, num_documents: int, *, is_masked: bool = False) -> pa.Table:
    """Write documents of which some begin with a prompt, which is not to be predicted, and some are all prompt."""
    tokens = [[number % 50, *((7 * number + at) % 50 for at in range(number % 13))] for number in range(num_documents)]
    labels = [[-100] * (number % 5) + row[number % 5 :] for number, row in enumerate(tokens)]
    labels = [label[: len(row)] for label, row in zip(labels, tokens, strict=True)]
    columns = {"input_ids": tokens, "labels": labels}
    if is_masked:
        masks = [[0] * (number % 3) + [1] * len(row) + [0] * (number % 2) for number, row in enumerate(tokens)]
        columns |= {"attention_mask": masks}
        for name, fill in (("input_ids", 9), ("labels", -100)):
            padded = zip(columns[name], masks, strict=True)
            columns[name] = [
                [fill] * (number % 3) + row + [fill] * (number % 2) for number, (row, _) in enumerate(padded)
            ]
    table = pa.table({name: pa.array(values, pa.list_(pa.int32())) for name, values in columns.items()})
    pq.write_table(table, path, row_group_size=7)
    return table


def predicted(rows: pa.Table) -> Counter[tuple[int, ...]]:
    """Return what a language model is to predict from what: a document up to a token, and that token."""
    names = set(rows.schema.names)
    columns = TokenColumns(
        "input_ids", "labels", *(name if name in names else None for name in ("attention_mask", "document_ids"))
    )
    batch = columns.collate(rows, np.arange(len(rows)), 64, 50)
    width = batch["tokens"].shape[1]
    found: Counter[tuple[int, ...]] = Counter()
    for place, target in zip(batch["places"].tolist(), batch["targets"].tolist(), strict=True):
        row, at = divmod(place, width)
        before = batch["tokens"][row, : at + 1]
        if "documents" in batch:
            before = before[batch["documents"][row, : at + 1] == batch["documents"][row, at]]
        found[*before.tolist(), target] += 1
    return found


@pytest.mark.parametrize("is_masked", [False, True])
def test_what_is_to_be_predicted_is_the_same_in_packed_rows(tmp_path: Path, is_masked: bool) -> None:
    """Every target comes after what it came after, and no token became one; padding is left out."""
    rows = labelled(tmp_path / "a.parquet", 200, is_masked=is_masked)
    [report] = pack(tmp_path / "out", [tmp_path / "a.parquet"], PackOptions(32, share=0, num_open=8)).reports
    packed = pa.concat_tables(map(pq.read_table, sorted((tmp_path / "out" / "train").glob("*.parquet"))))
    assert predicted(packed) == predicted(rows) and len(packed) < 100
    labels = packed["labels"].combine_chunks().flatten().to_numpy()
    assert report.targets == (labels != -100).sum() > 0
    assert report.tokens == len(labels) == sum(number % 13 + 1 for number in range(200))


def test_an_end_is_to_be_predicted_if_the_token_before_it_is(tmp_path: Path) -> None:
    """Documents that are cut keep their labels as well."""
    columns = {"input_ids": [list(range(10)), [11, 12]], "labels": [[-100] * 4 + list(range(4, 10)), [11, -100]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    pack(tmp_path / "out", [tmp_path / "a.parquet"], PackOptions(8, end="40", share=0))
    rows = pq.read_table(tmp_path / "out" / "train" / "part-00000.parquet").to_pylist()
    found = {tuple(row["input_ids"]): row["labels"] for row in rows}
    assert found == {tuple(range(8)): [-100] * 4 + [4, 5, 6, 7], (8, 9, 40, 11, 12, 40): [8, 9, 40, 11, -100, -100]}


def test_rows_with_and_without_labels_are_packed_apart(tmp_path: Path) -> None:
    with_labels, without = tmp_path / "a.parquet", tmp_path / "b.parquet"
    labelled(with_labels, 5)
    pq.write_table(pa.table({"input_ids": [[1, 2]]}), without)
    for files, message in (
        ([with_labels, without], r"b\.parquet: no column 'labels'"),
        ([without, with_labels], r"a\.parquet: has a column 'labels', and the files before it have none"),
    ):
        with pytest.raises(ConfigError, match=message):
            pack(tmp_path / "out", files, PackOptions(8))


BAD: dict[str, tuple[dict[str, list[object]], dict[str, object], str]] = {
    "text without a tokenizer": ({"text": ["a"]}, {}, "name a tokenizer.json with --tokenizer"),
    "no such column": ({"texts": ["a"]}, {}, "no column 'text'; did you mean 'texts'"),
    "a missing text": ({"text": ["a", None]}, {"tokenizer": True}, "row 2: has no text under 'text'"),
    "a negative token": ({"input_ids": [[1], [2, -1]]}, {}, "row 2: has the token id -1"),
    "a huge token": ({"input_ids": [[1], [1 << 31]]}, {}, "row 2: has the token id 2147483648"),
    "a token of another tokenizer": ({"input_ids": [[1, 9999]]}, {"tokenizer": True}, "row 1: has the token id 9999"),
    "a missing token": ({"input_ids": [[1], [2, None]]}, {}, "row 2: has the token id None"),
    "a missing list": ({"input_ids": [[1], None]}, {}, "row 2: has no list"),
    "too few labels": (
        {"input_ids": [[1], [2, 3]], "labels": [[1], [3]]},
        {},
        "row 2: has 1 values under 'labels', but 2",
    ),
    "an unknown label": ({"input_ids": [[1, 2]], "labels": [[1, -1]]}, {}, "token id -1 under 'labels'; .*, or -100: "),
    "labels that are no lists": ({"input_ids": [[1, 2]], "labels": [1]}, {}, "'labels' is int64, not lists"),
    "a hole in a mask": (
        {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]},
        {},
        "row 1: 'attention_mask' hides tokens between others",
    ),
    "lists of words": ({"input_ids": [["a"]]}, {}, "not lists of token ids"),
    "an unknown end": (
        {"text": ["a"]},
        {"tokenizer": True, "end": "<endd>"},
        "no token '<endd>'; did you mean '<end>'",
    ),
    "an end without tokenizer": ({"input_ids": [[1]]}, {"end": "<end>"}, "without a tokenizer give the id"),
    "an end above the vocabulary": ({"text": ["a"]}, {"tokenizer": True, "end": "9999"}, "token ids are below"),
    "nothing left": ({"input_ids": [[1]]}, {"share": 0.999999}, "no document is left for train"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_packed_is_named(tmp_path: Path, tokenizer: Path, case: str) -> None:
    columns, options, message = BAD[case]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    given = {**options, "tokenizer": tokenizer if "tokenizer" in options else None}
    with pytest.raises(ConfigError, match=message):
        pack(tmp_path / "out", [tmp_path / "a.parquet"], PackOptions(8, **given))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=r"a\.txt: is not a tokenizer\.json"):
        pack(tmp_path / "out", [tmp_path / "a.txt"], PackOptions(8, tmp_path / "a.txt"))
