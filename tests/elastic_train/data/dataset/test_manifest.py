"""The manifest: the same files give the same digest, other files another, and files that cannot serve are named."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

from elastic_train.core.accounting import CoverageSums
from elastic_train.core.order import Order
from elastic_train.data.dataset.manifest import NAME, Manifest, build_manifest, load_manifest
from elastic_train.data.tables.files import read_files
from elastic_train.errors import ConfigError, DataError
from tests.conftest import write_rows

Break = Callable[[Path], object]


def write_ids(path: Path, ids: list[int], *, group_rows: int = 10) -> None:
    """Write a file with a column `id` and a column `label` that counts 0, 1, 2, 0, ..."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": pa.array(ids, pa.int64()), "label": pa.array([i % 3 for i in ids], pa.int32())})
    pq.write_table(table, path, row_group_size=group_rows)


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes of a file."""
    path.write_bytes(path.read_bytes()[:size])


def test_the_same_files_give_the_same_manifest(tmp_path: Path) -> None:
    """Built twice, and of a copy elsewhere, the manifest has the same bytes and the same digest."""
    write_rows(tmp_path / "a", 50)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = (tmp_path / "a" / NAME).read_bytes()
    again, copied = (build_manifest(str(tmp_path / name), label_column="label") for name in ("a", "b"))
    assert (tmp_path / "a" / NAME).read_bytes() == first
    assert (tmp_path / "b" / NAME).read_bytes() == first
    assert again.digest == copied.digest


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    """A manifest with every field survives its JSON."""
    write_ids(tmp_path / "a.parquet", [0, 1, 2])
    built = build_manifest(
        str(tmp_path),
        label_column="label",
        labels=("x", "y", "z"),
        schema_name="custom",
        numeric_columns=("id",),
        categorical_columns=(),
        vocabulary_size=9,
    )
    loaded = load_manifest(str(tmp_path))
    assert (loaded, loaded.digest) == (built, built.digest)


def test_ids_number_the_rows_in_the_order_of_file_names(tmp_path: Path) -> None:
    """Files come sorted by path, in folders too, with the rows of each row group."""
    write_ids(tmp_path / "b.parquet", [3, 4])
    write_ids(tmp_path / "a" / "z.parquet", list(range(25)))
    manifest = build_manifest(str(tmp_path))
    assert [file.path for file in manifest.files] == ["a/z.parquet", "b.parquet"]
    assert manifest.group_rows.tolist() == [10, 10, 5, 2]
    assert (manifest.num_rows, manifest.columns) == (27, {"id": "int64", "label": "int32"})
    assert manifest.coverage == CoverageSums.of_all(27)


def test_folders_may_have_any_name(tmp_path: Path) -> None:
    """A pattern's characters, or the suffix of a file, as Spark names what it writes."""
    folder = tmp_path / "set[1] *?"
    write_ids(folder / "days.parquet" / "part-0.parquet", [0, 1])
    write_ids(folder / "days.parquet" / "part-1.parquet", [2])
    manifest = build_manifest(str(folder))
    assert [file.path for file in manifest.files] == ["days.parquet/part-0.parquet", "days.parquet/part-1.parquet"]


@pytest.mark.parametrize("ids", [[0, 1, 5], [0, 1], [0, 2, 1]], ids=["a value", "a row", "the order"])
def test_the_digest_changes_with_the_data(tmp_path: Path, ids: list[int]) -> None:
    """Another value, a row less, or another order of rows is another dataset."""
    write_ids(tmp_path / "a.parquet", [0, 1, 2])
    before = build_manifest(str(tmp_path))
    write_ids(tmp_path / "a.parquet", ids)
    assert build_manifest(str(tmp_path)).digest != before.digest


def test_a_renamed_file_is_another_dataset(tmp_path: Path) -> None:
    """Names decide sample ids, so they are in the digest."""
    write_ids(tmp_path / "a.parquet", [0, 1, 2])
    before = build_manifest(str(tmp_path))
    (tmp_path / "a.parquet").rename(tmp_path / "b.parquet")
    assert build_manifest(str(tmp_path)).digest != before.digest


def test_the_location_is_not_part_of_a_manifest(tmp_path: Path) -> None:
    """The same bytes over memory:// and on disk have one digest."""
    write_ids(tmp_path / "a.parquet", [0, 1, 2])
    with fsspec.open("memory://manifest-place/a.parquet", "wb") as file:
        file.write((tmp_path / "a.parquet").read_bytes())
    in_memory = build_manifest("memory://manifest-place")
    assert load_manifest("memory://manifest-place") == in_memory == build_manifest(str(tmp_path))


def test_labels_are_counted(tmp_path: Path) -> None:
    """Counts run over all files, and a named label that no row has counts 0."""
    write_ids(tmp_path / "a.parquet", [0, 1, 3])
    write_ids(tmp_path / "b.parquet", [6, 7, 2])
    manifest = build_manifest(str(tmp_path), label_column="label", labels=("a", "b", "c", "d"))
    assert manifest.label_counts == (3, 2, 1, 0)


BROKEN: dict[str, tuple[Break, str]] = {
    "cut in the middle": (lambda path: cut(path, 500), "a.parquet: does not end as a Parquet file does; .* copy it"),
    "cut to nothing": (
        lambda path: cut(path, 0),
        "a.parquet: 0 bytes are not a Parquet file; it is truncated, copy it",
    ),
    "no rows": (lambda path: write_ids(path, []), "a.parquet: has an empty row group, or none; write it again"),
    "no label column": (
        lambda path: pq.write_table(pa.table({"id": [1]}), path),
        "a.parquet: no label column 'label'; it has id",
    ),
    "text as labels": (
        lambda path: pq.write_table(pa.table({"label": ["x"]}), path),
        "a.parquet: label column 'label' is string, not an integer",
    ),
    "a missing label": (
        lambda path: pq.write_table(pa.table({"label": pa.array([1, None], pa.int32())}), path),
        "a.parquet: label column 'label' has missing values in row group 0",
    ),
    "a negative label": (
        lambda path: pq.write_table(pa.table({"label": pa.array([1, -1], pa.int32())}), path),
        "a.parquet: label column 'label' runs from -1 to 1 in row group 0; labels number the classes",
    ),
    "a label of no class": (
        lambda path: pq.write_table(pa.table({"label": pa.array([0, 10**12], pa.int64())}), path),
        "a.parquet: label column 'label' runs from 0 to 1000000000000 in row group 0; labels number the classes",
    ),
    "two columns of one name": (
        lambda path: pq.write_table(pa.table([pa.array([0]), pa.array([1])], names=["label", "label"]), path),
        "a.parquet: has several columns of one name: label, label; rename them",
    ),
    "an encrypted footer": (
        lambda path: path.write_bytes(path.read_bytes()[:-4] + b"PARE"),
        "a.parquet: is encrypted, in whole or in some columns; write it again without",
    ),
    "another name of Parquet": (lambda path: path.rename(path.with_suffix(".pq")), "a.pq: the names of Parquet files"),
    "a broken link": (
        lambda path: (path.unlink(), path.symlink_to("nowhere"))[1],
        "a.parquet: is a link to a file that is not there",
    ),
    "a footer of noise": (
        lambda path: path.write_bytes(b"PAR1" + b"x" * 64 + (60).to_bytes(4, "little") + b"PAR1"),
        "a.parquet: its footer cannot be read",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_unusable_file_is_named(tmp_path: Path, case: str) -> None:
    """A file that is truncated, or lacks a usable label, is refused by name and with what is wrong."""
    harm, message = BROKEN[case]
    write_ids(tmp_path / "a.parquet", list(range(100)))
    harm(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        build_manifest(str(tmp_path), label_column="label")
    assert not (tmp_path / NAME).exists()


def test_a_link_to_a_folder_of_files_is_refused(tmp_path: Path) -> None:
    """It is not followed, and its rows would be missing; links to files are followed."""
    write_ids(tmp_path / "rows" / "a.parquet", [0, 1, 2])
    write_ids(tmp_path / "far" / "b.parquet", [3, 4])
    (tmp_path / "rows" / "more").symlink_to(tmp_path / "far")
    with pytest.raises(DataError, match=r"rows/more: is a link to a folder, whose Parquet files would be left out"):
        build_manifest(str(tmp_path / "rows"))
    (tmp_path / "rows" / "more").unlink()
    (tmp_path / "rows" / "b.parquet").symlink_to(tmp_path / "far" / "b.parquet")
    assert build_manifest(str(tmp_path / "rows")).num_rows == 5


def test_encrypted_columns_are_refused_and_not_looked_at(tmp_path: Path) -> None:
    """With a footer in plain text: Arrow ends the process, without an exception, where one is looked at."""

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
            return base64.b64encode(key_bytes)

    factory = encryption.CryptoFactory(lambda config: Keys())
    how = encryption.EncryptionConfiguration("f", column_keys={"c": ["label"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), how)
    pq.write_table(pa.table({"a": [1], "label": [0]}), tmp_path / "a.parquet", encryption_properties=properties)
    with pytest.raises(DataError, match=r"a\.parquet: is encrypted"):
        build_manifest(str(tmp_path), label_column="label")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read: is encrypted"):
        list(read_files([tmp_path / "a.parquet"]))


def test_files_must_have_one_schema(tmp_path: Path) -> None:
    """The second of two files with different columns is named together with the first."""
    write_ids(tmp_path / "a.parquet", [1])
    pq.write_table(pa.table({"id": ["text"]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b\.parquet: its schema differs from .*a\.parquet's"):
        build_manifest(str(tmp_path))


def test_more_labels_than_names_are_refused(tmp_path: Path) -> None:
    """A label beyond the names would train as a class that nobody named."""
    write_ids(tmp_path / "a.parquet", [0, 1, 2])
    with pytest.raises(DataError, match="holds label 2, but only 2 labels are named"):
        build_manifest(str(tmp_path), label_column="label", labels=("x", "y"))


def test_a_folder_without_parquet_is_refused(tmp_path: Path) -> None:
    """A manifest describes at least one file."""
    with pytest.raises(DataError, match="no Parquet file there"):
        build_manifest(str(tmp_path))


def test_a_folder_without_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    """The message names the commands that make a dataset and the function that describes one."""
    with pytest.raises(ConfigError, match=r"elastic-train data import\|synth.*build_manifest"):
        load_manifest(str(tmp_path))


def test_a_place_that_is_nearly_a_dataset_says_what_to_name(tmp_path: Path) -> None:
    """The folder that an import wrote has parts, and a file of rows is to be imported."""
    for name, says in {
        "rows.csv": f"`elastic-train data import rows OUT {tmp_path}/rows.csv`",
        "a.parquet": rf"build_manifest\('{tmp_path}'\), and name {tmp_path}",
        "a.PNG": "images OUT DIR`, which takes DIR/LABEL/IMAGE, or DIR/IMAGE without labels",
        "a.docx": "data import --help",
    }.items():
        (tmp_path / name).write_text("text")
        with pytest.raises(ConfigError, match=rf"{name}: is a file, and a dataset is a folder: .*{says}"):
            load_manifest(str(tmp_path / name))
    with pytest.raises(ConfigError, match=rf"describe its Parquet files once with .*build_manifest\('{tmp_path}'\)"):
        load_manifest(str(tmp_path))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.JPG").touch()
    with pytest.raises(ConfigError, match=r"photos: no .*; import its images with .* data import images OUT"):
        load_manifest(str(tmp_path / "photos"))
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
        (tmp_path / part / NAME).write_text("{}")
    with pytest.raises(ConfigError, match=rf"but in its parts: name {tmp_path}/train or {tmp_path}/validation"):
        load_manifest(str(tmp_path))


def without_files(fields: dict[str, object]) -> str:
    return json.dumps({name: value for name, value in fields.items() if name != "files"})


DAMAGED: dict[str, tuple[Callable[[dict[str, object]], str], str]] = {
    "half of it": (lambda fields: json.dumps(fields)[:80], "cannot be read as a manifest"),
    "another format": (lambda fields: json.dumps({**fields, "format": 99}), "is not a manifest of format 1"),
    "a list": (lambda _: "[]", "is not a manifest of format 1"),
    "no files": (without_files, "lacks or has unknown fields: 'files'"),
    "an unknown field": (lambda fields: json.dumps({**fields, "speed": 1}), "lacks or has unknown fields: .*speed"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_manifest_is_named(tmp_path: Path, case: str) -> None:
    """A manifest that is cut off, of another format or with other fields is an error that names its file."""
    harm, message = DAMAGED[case]
    path = write_rows(tmp_path / "rows", 20) / NAME
    path.write_text(harm(json.loads(path.read_text())))
    with pytest.raises(DataError, match=f"{NAME}: {message}"):
        load_manifest(str(path.parent))


def test_group_rows_add_up(tmp_path: Path) -> None:
    """Row groups of all files hold every row once."""
    manifest: Manifest = load_manifest(str(write_rows(tmp_path / "rows", 101, group_rows=17)))
    assert manifest.group_rows.tolist() == [17, 17, 17, 17, 17, 16]
    assert int(manifest.group_rows.sum()) == manifest.num_rows == 101


def test_row_groups_are_numbered_through_all_files(tmp_path: Path) -> None:
    """Each has a place in one file, and its first sample's id counts the rows before it."""
    for name, rows in (("a", 25), ("b", 7), ("c", 30)):
        write_ids(tmp_path / f"{name}.parquet", list(range(rows)))
    manifest = build_manifest(str(tmp_path))
    places = [manifest.place_of_group(group) for group in range(len(manifest.group_rows))]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert manifest.group_first_id.tolist() == [0, 10, 20, 25, 32, 42, 52]
    assert manifest.group_first_id.tolist() == Order(manifest.group_rows, num_lanes=1, seed=1).group_first_id.tolist()
