"""Imports of rows, folders of Hugging Face's datasets, and images: what becomes of them, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_train.data.corpora.tokenizer import train_tokenizer
from elastic_train.data.dataset.encoded_images import TooLargeError, open_image
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.dataset.row_lengths import load_lengths
from elastic_train.data.tables.digits import import_digits
from elastic_train.data.tables.hf_folder import import_hf_folder, parts_of, splits_of, taken_from
from elastic_train.data.tables.image_folder import import_images
from elastic_train.data.tables.images import ImageCheck
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.data.tables.writer import BYTES_PER_GROUP, PartWriter
from elastic_train.errors import ConfigError, DataError
from tests.conftest import ROOT

PARTS = ("train", "validation")
KINDS = ("b", "a", "a", "c", "a", "b")


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_rows(num_rows: int) -> list[dict[str, Any]]:
    return [
        {"text": f"a text, number {row % 70}", "label": KINDS[row % 6], "size": row if row % 3 else None, "kind": "x"}
        for row in range(num_rows)
    ]


def png(shade: int, size: int = 5) -> bytes:
    content = io.BytesIO()
    Image.new("L", (size, size), shade).save(content, "png")
    return content.getvalue()


def test_rows_become_a_dataset_of_two_parts(tmp_path: Path) -> None:
    """Every row is in one of them, in order; equal texts are in the same one; labels are numbered by frequency."""
    rows = some_rows(100)
    path = write_lines(tmp_path / "a.jsonl", rows)
    options = RowOptions(numeric=("size",), categorical=("kind",))
    made = import_rows(tmp_path / "out", {"train": [path]}, "jsonl", options)
    train, validation = (rows_in(tmp_path / "out" / part) for part in PARTS)
    names = made.manifests[0].labels or ()
    assert names == made.manifests[1].labels == ("a", "b", "c")
    assert Counter(
        json.dumps({**row, "label": names[row["label"]]}, sort_keys=True) for row in train + validation
    ) == Counter(json.dumps(row, sort_keys=True) for row in rows)
    assert not {row["text"] for row in train} & {row["text"] for row in validation}
    assert [rows.index({**row, "label": names[row["label"]]}) for row in train[:40]] == sorted(
        rows.index({**row, "label": names[row["label"]]}) for row in train[:40]
    )
    assert made.manifests[0].numeric_columns == ("size",)
    assert made.manifests[0].categorical_columns == ("kind",)
    assert not import_rows(tmp_path / "out", {"train": [path]}, "jsonl", options).is_new


def test_rows_of_ones_own_validate(tmp_path: Path) -> None:
    """Each file becomes its part, in order; types and labels are those of the training rows."""
    train = write_lines(tmp_path / "a.jsonl", [{"label": "ab"[row % 2], "size": row + 0.5} for row in range(9)])
    held = write_lines(tmp_path / "b.jsonl", [{"label": "b", "size": 1}, {"label": "a", "size": 2}])
    parts = {"train": [train], "validation": [held]}
    made = import_rows(tmp_path / "out", parts, "jsonl", RowOptions())
    assert [manifest.num_rows for manifest in made.manifests] == [9, 2]
    assert made.manifests[0].labels == made.manifests[1].labels == ("a", "b")
    assert made.manifests[0].columns == made.manifests[1].columns
    assert rows_in(tmp_path / "out" / "validation") == [{"label": 1, "size": 1.0}, {"label": 0, "size": 2.0}]
    assert not import_rows(tmp_path / "out", parts, "jsonl", RowOptions()).is_new
    with pytest.raises(ConfigError, match=r"made differently \(validation_files\)"):
        import_rows(tmp_path / "out", {"train": [train, held]}, "jsonl", RowOptions())


def test_rows_of_ones_own_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Otherwise the task would refuse the finished validation set when training starts."""
    train, held = tmp_path / "a.csv", tmp_path / "b.csv"
    train.write_text("text,label\n" + "x,a\ny,b\n" * 4)
    for content, message in (
        ("text,kind\nx,a\n", r"b\.csv: has the columns text, kind, but .*a\.csv has text, label"),
        ("text,label\nx,c\n", r"b\.csv: row 2: has the label c, which no training row has"),
    ):
        held.write_text(content)
        with pytest.raises(ConfigError, match=message):
            import_rows(tmp_path / "out", {"train": [train], "validation": [held]}, "csv", RowOptions())
    assert not (tmp_path / "out").exists()


def test_text_becomes_tokens_of_any_tokenizer(tmp_path: Path) -> None:
    made = train_tokenizer(["a text, number"], 300)
    made.save(str(tmp_path / "own.json"))
    path = write_lines(tmp_path / "a.jsonl", some_rows(60))
    options = RowOptions(tokenizer=tmp_path / "own.json", max_tokens=6, share=0)
    manifest = import_rows(tmp_path / "out", {"train": [path]}, "jsonl", options).manifests[0]
    rows = rows_in(tmp_path / "out" / "train")
    assert {tuple(row) for row in rows} == {("input_ids", "size", "kind", "label")}
    assert {made.decode(row["input_ids"]) for row in rows} == {
        made.decode(made.encode(row["text"]).ids[:6]) for row in some_rows(60)
    }
    assert (tmp_path / "out" / "train" / "tokenizer.json").read_bytes() == (tmp_path / "own.json").read_bytes()
    assert (manifest.vocabulary_size, manifest.label_counts is not None) == (made.get_vocab_size(), True)
    assert load_lengths(manifest).longest == max(len(row["input_ids"]) for row in rows), "known before a run begins"


def test_numbers_stay_labels_and_rows_may_have_none(tmp_path: Path) -> None:
    numbered = write_lines(tmp_path / "a.jsonl", [{"n": row, "label": row % 3} for row in range(50)])
    bare = write_lines(tmp_path / "b.jsonl", [{"n": row} for row in range(50)])
    made = import_rows(tmp_path / "numbered", {"train": [numbered]}, "jsonl", RowOptions(share=0))
    assert made.manifests[0].labels is None and made.manifests[0].label_counts == (17, 17, 16)
    (manifest,) = import_rows(tmp_path / "bare", {"train": [bare]}, "jsonl", RowOptions(share=0)).manifests
    assert (manifest.label_column, manifest.num_rows, manifest.url) == (None, 50, str(tmp_path / "bare" / "train"))


BAD_ROWS: dict[str, tuple[list[dict[str, Any]], RowOptions, str]] = {
    "no label": (
        [{"label": "a"}, {"label": None}],
        RowOptions(),
        r"a\.jsonl: row 2: has no label: 'label' is empty or",
    ),
    "a blank label": ([{"label": "a"}, {"label": " "}], RowOptions(), r"row 2: has no label: 'label' is empty or NaN"),
    "a NaN": ([{"label": 1}, {"label": float("nan")}], RowOptions(), "row 2: has no label: 'label' is empty or NaN"),
    "the name nan": ([{"label": "a"}, {"label": "nan"}], RowOptions(), "row 2: has no label: 'label' is empty or NaN"),
    "a negative label": ([{"label": 1}, {"label": -1}], RowOptions(), "row 2: has no label: 'label' is -1"),
    "a fraction": ([{"label": 0.5}], RowOptions(), "label column 'label' is double: .*write it as text, in quotes"),
    "one label": ([{"label": "a"}] * 9, RowOptions(), "has one label, a; a classifier needs at least 2"),
    "another column": ([{"labels": "a"}], RowOptions(label_key="label"), "no column 'label'; did you mean 'labels'"),
    "no metadata": ([{"size": 1}], RowOptions(numeric=("sice",)), "no column 'sice'; did you mean 'size'"),
    "two labels": (
        [{"label": 0, "kind": 1}],
        RowOptions(label_key="kind"),
        "has 'label' in addition to --label-key kind",
    ),
    "objects without a field": (
        [{"n": 1, "meta": {}}],
        RowOptions(share=0),
        "cannot be stored as Parquet: .*'meta' with no child field .*Or leave the column out",
    ),
    "too few": ([{"n": 1}], RowOptions(), "no row is left for validation: .*--validation-share"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_rows_that_cannot_be_imported_are_named(tmp_path: Path, case: str) -> None:
    rows, options, message = BAD_ROWS[case]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        import_rows(tmp_path / "out", {"train": [path]}, "jsonl", options)
    assert not (tmp_path / "out").exists()


def test_tokens_are_not_made_over_others(tmp_path: Path) -> None:
    train_tokenizer(["a"], 300).save(str(tmp_path / "own.json"))
    path = write_lines(tmp_path / "a.jsonl", [{"text": "a", "input_ids": [1]}])
    with pytest.raises(ConfigError, match="has 'input_ids', which --tokenizer makes"):
        import_rows(tmp_path / "out", {"train": [path]}, "jsonl", RowOptions(tokenizer=tmp_path / "own.json"))


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_row_groups_are_bounded_in_bytes_and_rows(tmp_path: Path, at_once: int) -> None:
    """However many rows come together: photographs are few in a row group, and small rows as many as were asked for."""
    large = [bytes([number]) * (BYTES_PER_GROUP // 4) for number in range(10)]
    with PartWriter(tmp_path / "out", rows_per_group=6) as writer:
        for rows in (large, [bytes([number]) for number in range(20)]):
            for lo in range(0, len(rows), at_once):
                writer.write(pa.RecordBatch.from_pydict({"image": rows[lo : lo + at_once]}))
    file = pq.ParquetFile(tmp_path / "out" / "part-00000.parquet")
    groups = [file.read_row_group(number).column("image").to_pylist() for number in range(file.num_row_groups)]
    assert [row for group in groups for row in group] == large + [bytes([number]) for number in range(20)]
    assert [len(group) for group in groups] == [3, 3, 3, 6, 6, 6, 3]  # offsets count, too
    assert max(sum(map(len, group)) for group in groups) <= BYTES_PER_GROUP


def write_split(folder: Path, rows: dict[str, Any], features: dict[str, Any], kind: str = "arrow") -> None:
    """Write a split as Hugging Face's datasets do it."""
    schema = pa.table(rows).schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(rows, schema=schema)
    if kind == "parquet":
        pq.write_table(table, folder / f"{folder.name}-00000-of-00001.parquet")
        return
    with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", schema) as stream:
        stream.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "cache-1.arrow").write_text("left over")


def test_files_have_the_columns_of_the_first_in_any_order(tmp_path: Path) -> None:
    """As the exports of two programs, or of two versions of one."""
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("y,x\n4,3\n")
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    import_rows(tmp_path / "out", {"train": files}, "csv", RowOptions(share=0))
    assert rows_in(tmp_path / "out" / "train") == [{"x": 1, "y": 2}, {"x": 3, "y": 4}]
    for header, found in (("x,y,z\n1,2,3\n", "x, y, z"), ("x\n1\n", "x")):
        (tmp_path / "b.csv").write_text(header)
        with pytest.raises(ConfigError, match=rf"b\.csv: has the columns {found}, but .*a\.csv has x, y; both must"):
            import_rows(tmp_path / "new", {"train": files}, "csv", RowOptions(share=0))


FEATURES = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_folder_of_hugging_face_keeps_splits_classes_and_images(tmp_path: Path, kind: str) -> None:
    for split, labels in (("train", [1, 0, 1]), ("validation", [0, 0]), ("test", [-1])):
        images = [{"bytes": png(shade), "path": f"{shade}.png"} for shade in range(len(labels))]
        write_split(tmp_path / "hf" / split, {"image": images, "label": labels}, FEATURES, kind)
    made = import_hf_folder(tmp_path / "out", tmp_path / "hf", RowOptions())
    assert [manifest.num_rows for manifest in made.manifests] == [3, 2]
    assert {manifest.labels for manifest in made.manifests} == {("cat", "dog")}
    assert rows_in(tmp_path / "out" / "train") == [
        {"image": png(shade), "label": label} for shade, label in enumerate([1, 0, 1])
    ]


def test_a_folder_without_splits_is_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", some_rows(60))
    assert splits_of(tmp_path) == {"train": [tmp_path / "data.jsonl"]}
    made = import_hf_folder(tmp_path / "out", tmp_path, RowOptions())
    assert sum(manifest.num_rows for manifest in made.manifests) == 60 and len(made.manifests) == 2


WITHOUT_PANDAS = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pandas":
            raise ImportError(name)

sys.meta_path.insert(0, Hidden())
from pathlib import Path
from elastic_train.data.tables.importing import RowOptions, import_rows
from elastic_train.data.tables.objects import read_objects

made = import_rows(Path("without"), {"train": [Path("a.parquet")]}, "hf-folder", RowOptions(share=0.3))
assert len(next(read_objects([Path("a.parquet")])).values) == 40
print(made.manifests[0].digest)
"""


def test_times_in_nanoseconds_are_imported_with_pandas_and_without(tmp_path: Path) -> None:
    """Into the same parts: Arrow gives them as pandas' objects, or refuses those that Python's cannot hold."""
    times = pa.array([17 * 10**17 + number for number in range(40)], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"n": range(40), "at": times}), tmp_path / "a.parquet")
    command = [sys.executable, "-c", WITHOUT_PANDAS]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    made = import_rows(tmp_path / "with", {"train": [tmp_path / "a.parquet"]}, "hf-folder", RowOptions(share=0.3))
    assert made.manifests[0].digest == ran.stdout.strip()
    assert pq.read_schema(tmp_path / "with" / "train" / "part-00000.parquet").field("at").type == times.type


def test_a_link_to_a_folder_of_rows_is_refused(tmp_path: Path) -> None:
    """It is not followed, and its rows would be missing; other links are nobody's loss."""
    for folder in ("hf", "far"):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / f"train-{folder}.jsonl", some_rows(3))
    (tmp_path / "hf" / "more").symlink_to(tmp_path / "far")
    with pytest.raises(ConfigError, match=r"hf/more: is a link to a folder, whose rows would be left out"):
        splits_of(tmp_path / "hf")
    (tmp_path / "far" / "train-far.jsonl").rename(tmp_path / "far" / "notes.md")
    assert splits_of(tmp_path / "hf") == {"train": [tmp_path / "hf" / "train-hf.jsonl"]}


@pytest.mark.parametrize("name", ["eval.jsonl", "data/evaluation-00000-of-00001.jsonl", "testing/a.jsonl"])
def test_what_the_hub_takes_for_a_test_is_not_trained_on(tmp_path: Path, name: str) -> None:
    for file in ("training.jsonl", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / file, some_rows(3))
    assert splits_of(tmp_path) == {"train": [tmp_path / "training.jsonl"], "test": [tmp_path / name]}


@pytest.mark.parametrize("name", ["README.jsonl", "extra/a.jsonl", "training_data/test.jsonl"])
def test_a_file_that_does_not_name_training_last_is_not_trained_on_beside_one_that_does(
    tmp_path: Path, name: str
) -> None:
    """As in Hugging Face's datasets; what is not taken is said."""
    for file in ("train/a.jsonl", name):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / file, some_rows(3))
    assert parts_of(tmp_path) == {"train": [tmp_path / "train" / "a.jsonl"]}
    assert taken_from(tmp_path) == f"train: train/a.jsonl; not taken: {name}"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"image": [{"bytes": b"no image", "path": "a"}], "label": [0]}, "row 1: is not an image that can be decoded"),
        ({"image": [{"bytes": None, "path": "a"}], "label": [0]}, "row 1: holds no image"),
        ({"image": [{"bytes": png(1), "path": "a"}], "label": [-1]}, "row 1: has no label: 'label' is -1"),
    ],
)
def test_rows_of_hugging_face_that_cannot_be_used_are_named(tmp_path: Path, rows: dict[str, Any], message: str) -> None:
    write_split(tmp_path / "hf" / "train", rows, FEATURES)
    with pytest.raises(ConfigError, match=message):
        import_hf_folder(tmp_path / "out", tmp_path / "hf", RowOptions(share=0))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_pointer_to_a_large_file_is_named(tmp_path: Path, suffix: str) -> None:
    """As a clone of a repository without its large files has them."""
    (tmp_path / f"train{suffix}").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ConfigError, match=rf"train{suffix}: is a pointer to a file of git LFS.*git lfs pull"):
        import_hf_folder(tmp_path / "out", tmp_path, RowOptions())


def test_a_class_beyond_the_names_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path / "hf" / "train", {"label": [0, 1, 2]}, FEATURES)
    with pytest.raises(DataError, match="holds label 2, but only 2 labels are named"):
        import_hf_folder(tmp_path / "out", tmp_path / "hf", RowOptions(share=0))


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no split 'train'"):
        import_hf_folder(tmp_path / "out", tmp_path, RowOptions())
    write_lines(tmp_path / "a.jsonl", some_rows(3))
    write_lines(tmp_path / "test.jsonl", some_rows(3))
    with pytest.raises(ConfigError, match=r"has no split 'train': a\.jsonl names none; call it train\.jsonl"):
        parts_of(tmp_path)
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "b.csv").write_text("text\na\n")
    with pytest.raises(ConfigError, match="files of several formats"):
        import_hf_folder(tmp_path / "out", tmp_path, RowOptions())


def write_images(folder: Path, num_images: int = 30) -> None:
    for shade in range(num_images):
        path = folder / ("cat", "dog", "eel")[shade % 3] / f"{shade}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(shade))


def test_folders_of_images_are_classes(tmp_path: Path) -> None:
    """Bytes stay as they are, labels are the folders' names, and rows are mixed."""
    write_images(tmp_path / "images")
    (tmp_path / "images" / "cat" / "Thumbs.db").touch()
    made = import_images(tmp_path / "out", tmp_path / "images", share=0.2, seed=3)
    rows = [row for part in PARTS for row in rows_in(tmp_path / "out" / part)]
    assert sorted((row["image"], row["label"]) for row in rows) == sorted(
        (png(shade), shade % 3) for shade in range(30)
    )
    assert made.manifests[0].labels == ("cat", "dog", "eel")
    trained = [row["label"] for row in rows_in(tmp_path / "out" / "train")]
    assert trained != sorted(trained)
    assert not import_images(tmp_path / "out", tmp_path / "images", share=0.2, seed=3).is_new
    write_images(tmp_path / "split" / "train", 6)
    write_images(tmp_path / "split" / "val", 3)
    made = import_images(tmp_path / "both", tmp_path / "split", share=0.2, seed=3)
    assert [manifest.num_rows for manifest in made.manifests] == [6, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cat/x.png", b"GIF?", r"cat/x\.png: is not an image that can be decoded"),
        ("cat/x.png", png(1, 50)[:-30], r"cat/x\.png: is not an image that can be decoded"),
        ("cat/x.png", b"", r"cat/x\.png: holds no image"),
        ("cat/notes.txt", b"", r"cat/notes\.txt: is none of \.png"),
        ("cat/more/x.png", png(1), r"cat/more/x\.png: is deeper than FOLDER/LABEL/FILE"),
        ("x.png", png(1), r"images/x\.png: no folder of a class holds them; put them"),
        ("cat/x.png", None, r"cat/x\.png: does not exist"),
        ("l\udcff/x.png", png(1), r"'l\\udcff' cannot be a class's name"),
    ],
    ids=["no image", "cut short", "empty", "another file", "too deep", "not deep enough", "broken link", "no text"],
)
def test_an_image_that_cannot_be_used_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    """Also where nothing would have looked for it."""
    write_images(tmp_path / "images")
    path = tmp_path / "images" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content) if content is not None else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=message):
        import_images(tmp_path / "out", tmp_path / "images", share=0.2, seed=3)
    assert not (tmp_path / "out").exists()


def test_all_images_that_do_not_decode_are_named_or_left_out(tmp_path: Path) -> None:
    """One that is only too large is whole: the limit is named, and can be raised."""
    write_images(tmp_path / "images")
    for name, content in (("cat/x.png", b"GIF?"), ("dog/y.png", b""), ("dog/z.png", png(1, 50))):
        (tmp_path / "images" / name).write_bytes(content)
    how = {"share": 0.2, "seed": 3}
    with pytest.raises(ConfigError) as refused:
        import_images(tmp_path / "out", tmp_path / "images", check=ImageCheck(most_megapixels=0.002), **how)
    lines = sorted(str(refused.value).splitlines())
    for line, why in zip(
        lines, ("cat/x.png: is not an image", "dog/y.png: holds no", "dog/z.png: is too"), strict=True
    ):
        assert why in line
    assert "--max-megapixels" in lines[2] and "PNG" not in lines[2] and "--skip-corrupt" in lines[0]
    assert not (tmp_path / "out").exists()
    made = import_images(tmp_path / "out", tmp_path / "images", check=ImageCheck(skips=True), **how)
    assert sum(part.num_rows for part in made.manifests) == 31 and len(made.left_out) == 2
    images = [{"bytes": content, "path": "a"} for content in (png(1), b"no image", png(2), None)]
    write_split(tmp_path / "hf" / "train", {"image": images, "label": [0, 1, 1, 0]}, FEATURES, "stream")
    with pytest.raises(ConfigError, match=r"row 2: is not an image.*\n.*row 4: holds no image"):
        import_hf_folder(tmp_path / "rows", tmp_path / "hf", RowOptions(share=0))
    options = RowOptions(share=0, images=ImageCheck(skips=True))
    made = import_hf_folder(tmp_path / "rows", tmp_path / "hf", options)
    assert made.manifests[0].label_counts == (1, 1) and len(made.left_out) == 2


@pytest.mark.heavy
def test_an_image_of_100_megapixels_is_opened_and_one_of_200_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default as far as Pillow goes; whatever Pillow's own limit is."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    contents = {}
    for width in (10_000, 20_000):
        Image.new("1", (width, 10_000)).save(content := io.BytesIO(), "png")
        contents[width] = content.getvalue()
    assert open_image(contents[10_000]).width == 10_000
    with pytest.raises(TooLargeError, match=r"200.0 megapixels; at most 178 .*task.params.max_megapixels"):
        open_image(contents[20_000])
    assert open_image(contents[20_000], 250).width == 20_000


def test_images_beside_no_folders_are_a_dataset_without_labels(tmp_path: Path) -> None:
    """They keep their order and names, and none validates."""
    (tmp_path / "images").mkdir()
    for shade in range(3):
        (tmp_path / "images" / f"{shade}.png").write_bytes(png(shade))
    (tmp_path / "images" / "Thumbs.db").touch()
    made = import_images(tmp_path / "out", tmp_path / "images", share=0.2, seed=3)
    assert [(manifest.label_column, manifest.num_rows) for manifest in made.manifests] == [(None, 3)]
    rows = rows_in(tmp_path / "out" / "train")
    assert rows == [{"image": png(shade), "file": f"{shade}.png"} for shade in range(3)]


def test_images_without_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no images; put those of each class"):
        import_images(tmp_path / "out", tmp_path, share=0.2, seed=3)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_bytes(png(1))
    with pytest.raises(ConfigError, match="has images in 1 folder"):
        import_images(tmp_path / "out", tmp_path, share=0.2, seed=3)


@pytest.mark.slow
def test_the_digits_are_all_there(tmp_path: Path) -> None:
    made = import_digits(tmp_path / "out", share=0.1, seed=7)
    assert sum(manifest.num_rows for manifest in made.manifests) == 1797
    assert len(load_manifest(made.manifests[0].url).label_counts or ()) == 10
    row = rows_in(tmp_path / "out" / "train")[0]
    assert Image.open(io.BytesIO(row["image"])).size == (8, 8)
    assert not import_digits(tmp_path / "out", share=0.1, seed=7).is_new
