"""`elastic-train data`: what it says and how it ends, as users call it; and describe and verify themselves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_train.cli.main import main
from elastic_train.data.dataset.describe import LENGTH_BOUNDS, describe
from elastic_train.data.dataset.encoded_images import verify_images
from elastic_train.data.dataset.manifest import NAME, SHARE, VALIDATION, build_manifest, load_manifest, part_of
from elastic_train.data.dataset.row_lengths import NAME as LENGTHS
from elastic_train.data.dataset.verify import verify
from elastic_train.data.parquet.footer import NAME as FOOTERS
from elastic_train.data.tables.digits import import_digits
from elastic_train.system.progress_bar import shown, silent
from tests.conftest import PATIENCE_S, ROOT, Finished, write_rows
from tests.elastic_train.data.chats.chat_tokenizers import CHATML, save_tokenizer
from tests.elastic_train.data.corpora.test_docstrings import write_functions
from tests.elastic_train.data.tables.test_texts import write_texts

pytestmark = pytest.mark.slow

Call = Callable[..., Finished]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `elastic-train data ...` here; the output is standard output and error, as one text."""

    def run(*arguments: object) -> Finished:
        with pytest.raises(SystemExit) as ended:
            main(["data", *map(str, arguments)])
        out, err = capsys.readouterr()
        return Finished(int(ended.value.code or 0), out + err)

    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_import_exits_with_0_and_an_empty_stderr(tmp_path: Path) -> None:
    """A separate process imports docstrings, with worker processes, and ends with code 0 and an empty error."""
    for library in ("torch", "sympy"):
        write_functions(tmp_path / "packages", library, 40)
    command = [sys.executable, "-m", "elastic_train.cli.main", "data", "import", "docstrings", str(tmp_path / "out")]
    arguments = ["--site-packages", str(tmp_path / "packages"), "--samples", "60", "--vocabulary", "512"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    train = load_manifest(str(tmp_path / "out" / "train"))
    assert f"{train.num_rows} rows in 4 files, 2 labels (torch 23, sympy 11), digest {train.digest[:12]}" in done.stdout
    assert [
        line for line in done.stderr.splitlines() if "reading source files" not in line and "stages" not in line
    ] == []


def test_text_is_imported_once(tmp_path: Path, call: Call) -> None:
    """The first import writes both parts, the second finds them; other options are refused and change nothing."""
    path, out = write_texts(tmp_path / "a.jsonl"), tmp_path / "out"
    assert call("import", "text", out, path).code == 0
    before = snapshot(out)
    assert sorted(before) == sorted(
        ["origin.json"]
        + [f"{part}/{name}" for part in ("train", "validation") for name in (NAME, FOOTERS, LENGTHS, "tokenizer.json")]
        + [f"{part}/part-0000{number}.parquet" for part in ("train", "validation") for number in range(4)]
    )
    again = call("import", "text", out, path)
    assert (again.code, "already exists" in again.output) == (0, True)
    other = call("import", "text", out, path, "--seed", 8)
    assert (other.code, "made differently (seed)" in other.output) == (2, True)
    assert snapshot(out) == before


def test_files_of_ones_own_validate(tmp_path: Path, call: Call) -> None:
    """`--validation` names them for texts, rows and chats; another kind of file is refused."""
    path, held = write_texts(tmp_path / "a.jsonl"), tmp_path / "b.jsonl"
    held.write_text(path.read_text().partition("\n")[0])
    for kind in ("text", "rows"):
        done = call("import", kind, tmp_path / kind, path, "--validation", held)
        assert (done.code, f"{tmp_path / kind}/validation: 1 row in 1 file" in done.output) == (0, True), done.output
    (tmp_path / "b.csv").write_text("text,label\na,b\n")
    assert "default: ()" not in call("import", "rows", "--help").output
    wrong = call("import", "rows", tmp_path / "wrong", path, "--validation", tmp_path / "b.csv")
    assert (wrong.code, "b.csv: must be .jsonl or .json" in wrong.output) == (2, True)
    pytest.importorskip("transformers")
    model, chats = save_tokenizer(tmp_path / "model", CHATML), tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    done = call("import", "rows", tmp_path / "chats", chats, "--tokenizer", model, "--validation", chats)
    assert (done.code, f"{tmp_path / 'chats'}/validation: 1 row in" in done.output) == (0, True), done.output


def test_synth_is_written_once(tmp_path: Path, call: Call) -> None:
    """Like an import: there already, refused if different, replaced with --replace."""
    out = tmp_path / "out"
    assert [call("synth", out, "--rows", 50).code for _ in range(2)] == [0, 0]
    before = snapshot(out)
    assert call("synth", out, "--rows", 51).code == 2
    assert snapshot(out) == before
    assert call("synth", out, "--rows", 51, "--schema", "policy", "--replace").code == 0
    assert (load_manifest(str(out)).num_rows, load_manifest(str(out)).schema_name) == (51, "policy")


def test_synth_writes_to_a_url(call: Call) -> None:
    """An fsspec URL is filled; a second time it takes --replace."""
    url = "memory://cli-synth"
    assert [call("synth", url, "--rows", 9).code for _ in range(2)] == [0, 2]
    assert call("synth", url, "--rows", 8, "--replace").code == 0
    assert load_manifest(url).num_rows == 8
    wrong = (("--rows", 0), ("--rows-per-group", 0), ("--seed", -1))
    assert [call("synth", url, *options, "--replace").code for options in wrong] == [2, 2, 2]
    assert load_manifest(url).num_rows == 8


def test_rows_are_imported_and_packed(tmp_path: Path, call: Call) -> None:
    """As the documentation shows it; reports for scripts on standard output, alone."""
    path, rows, out = write_texts(tmp_path / "a.jsonl"), tmp_path / "rows", tmp_path / "packed"
    assert call("import", "text", tmp_path / "text", path, "--vocabulary", 512).code == 0
    tokenizer = tmp_path / "text" / "train" / "tokenizer.json"
    made = call("import", "rows", rows, path, "--tokenizer", tokenizer, "--types", "label=string")
    assert (made.code, f"{rows}/validation: " in made.output) == (0, True), made.output
    done = call("pack", out, path, "--length", 16, "--tokenizer", tokenizer, "--end", "<pad>", "--json")
    _, _, printed = done.output.partition("[")
    reports = json.loads("[" + printed.partition("\n]")[0] + "]")
    assert [report["url"] for report in reports] == [str(out / "train"), str(out / "validation")]
    assert all(report["length"] == 16 and 0 <= report["padding_share"] < 0.2 for report in reports)
    again = call("pack", out, path, "--length", 16, "--tokenizer", tokenizer, "--end", "<pad>")
    assert (again.code, "already exists" in again.output) == (0, True)
    images = call("import", "images", tmp_path / "digits", "--digits")
    assert images.output.endswith(
        f"Done: {tmp_path}/digits, next: elastic-train init images FOLDER --data {tmp_path}/digits\n"
    )


def test_the_next_command_is_that_of_the_configuration_in_this_folder(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that `init` wrote, the line that follows in its head; elsewhere, training where it reads the data."""
    pytest.importorskip("transformers")
    model = save_tokenizer(tmp_path / "model", CHATML)
    with pytest.raises(SystemExit):
        main(["init", "sft", str(tmp_path / "made")])
    monkeypatch.chdir(tmp_path / "made")
    rows = [{"prompt": f"So, {number}?", "response": f"{number}"} for number in range(60)]
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made = call("import", "rows", "chats", "chats.jsonl", "--tokenizer", model)
    assert "\nDone: chats, next: elastic-train data pack data chats --length 256\n" in made.output
    packed = call("pack", "data", "chats", "--length", 256)
    assert "\nDone: data, next: elastic-train train config.yaml --optimizer.lr 5.0e-3\n" in packed.output
    Path("config.yaml").write_text("#   don't\ndata: {train: other/train}\n")
    assert (
        "next: elastic-train data pack own-packed own"
        in call("import", "rows", "own", "chats.jsonl", "--tokenizer", model).output
    )
    Path("config.yaml").write_text("data: {train: other/train}\n")
    written = call("synth", "other/train", "--rows", 50)
    assert "\nDone: other/train, next: elastic-train train config.yaml\n" in written.output


def test_rows_without_labels_may_be_there_to_be_predicted(tmp_path: Path, call: Call) -> None:
    """The next command is named for both; of labelled rows for training alone."""
    path, rows = write_texts(tmp_path / "a.jsonl"), tmp_path / "rows"
    assert "predict RUN" not in call("import", "text", tmp_path / "text", path, "--vocabulary", 512).output
    (tmp_path / "b.jsonl").write_text('{"text": "a text"}\n' * 30)
    tokenizer = tmp_path / "text" / "train" / "tokenizer.json"
    made = call("import", "rows", rows, tmp_path / "b.jsonl", "--tokenizer", tokenizer, "--validation-share", 0)
    predict = f"elastic-train predict RUN --data {rows}/train --out FILE"
    assert f"next: elastic-train init lm FOLDER --data {rows}; or {predict}\n" in made.output


def test_chats_are_imported_from_every_kind_of_file(tmp_path: Path, call: Call) -> None:
    """By a tokenizer alone; without one, rows stay what they are, and the option is named."""
    pytest.importorskip("transformers")
    model = save_tokenizer(tmp_path / "model", CHATML)
    rows = [{"prompt": f"So, {number}?", "response": f"{number}"} for number in range(60)]
    (tmp_path / "hf").mkdir()
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hf" / "train.parquet")
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.csv").write_text("prompt,response\n" + "".join(f'"So, {n}?",{n}\n' for n in range(60)))
    digests = []
    for kind, source in (("jsonl", "a.jsonl"), ("csv", "a.csv"), ("hf", "hf")):
        command = "hf-folder" if kind == "hf" else "rows"
        out = tmp_path / f"from-{kind}"
        made = call("import", command, out, tmp_path / source, "--tokenizer", model)
        assert made.code == 0 and "60 chats of prompt and response, 60 turns" in made.output, made.output
        assert f"\nDone: {out}, next: elastic-train data pack {out}-packed {out} --length 64\n" in made.output
        cut = call("import", command, f"{out}-cut", tmp_path / source, "--tokenizer", model, "--max-tokens", "96")
        assert f"data pack {out}-cut-packed {out}-cut --length 96\n" in cut.output, "as `init sft` writes it"
        digests.append(pq.read_table(out / "train" / "part-00000.parquet"))
    assert digests[0].equals(digests[1]) and digests[0].equals(digests[2])
    raw = call("import", "rows", tmp_path / "b", tmp_path / "a.jsonl")
    assert (
        f"{tmp_path}/b holds them as they are: to train on them, repeat this with --replace --tokenizer" in raw.output
    )
    text = call("import", "text", tmp_path / "d", tmp_path / "a.csv")
    assert (text.code, "looks like a chat, by its columns prompt, response: import chats with" in text.output) == (
        2,
        True,
    )
    assert (
        "has no column 'label'"
        in call("import", "text", tmp_path / "d", tmp_path / "a.csv", "--text-key", "prompt").output
    )
    (tmp_path / "a.jsonl").write_text('{"prompt": "", "response": "a"}\n' + lines)
    refused = call("import", "rows", tmp_path / "c", tmp_path / "a.jsonl", "--tokenizer", model)
    assert (refused.code, "row 1: its 'prompt' is empty" in refused.output) == (2, True)
    skipped = call("import", "rows", tmp_path / "c", tmp_path / "a.jsonl", "--tokenizer", model, "--skip-unfit")
    assert (skipped.code, "\n1 chat left out\n" in skipped.output) == (0, True)


def test_text_without_a_label_is_left_out_and_misspelt_labels_are_named(tmp_path: Path, call: Call) -> None:
    labels = ["positive", "negative"] * 30 + ["postive", "Negative", ""]
    rows = [f"{number},text {number},{label}" for number, label in enumerate(labels)]
    (tmp_path / "a.csv").write_text("\n".join(["id,text,label", *rows]))
    command = ["import", "text", tmp_path / "d", tmp_path / "a.csv", "--vocabulary", 512]
    assert (
        "row 64: 'label' is empty or no text; correct the row, or leave it out (--skip-unfit)" in call(*command).output
    )
    made = call(*command, "--skip-unfit")
    assert made.code == 0
    assert "not kept: id (`import rows` with --tokenizer keeps all columns)\n" in made.output
    assert "(--skip-unfit)\n1 row left out\n" in made.output
    assert re.findall("is the label '(.+)' meant to be '(.+)'", made.output) == [
        ("Negative", "negative"),
        ("postive", "positive"),
    ]


def test_a_label_that_only_validation_has_is_not_meant_to_be_itself(tmp_path: Path, call: Call) -> None:
    held_out = next(f"text {n}" for n in range(100) if part_of(repr(f"text {n}").encode(), SHARE, 7) == VALIDATION)
    rows = [f"row {number},{label}" for number, label in enumerate(["cat", "dog"] * 30)]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows, f"{held_out},eel"]))
    made = call("import", "rows", tmp_path / "d", tmp_path / "a.csv")
    assert (made.code, "eel 0)" in made.output, "meant to be" in made.output) == (0, True, False)


def test_many_labels_are_not_compared_with_each_other(tmp_path: Path, call: Call) -> None:
    """Ten thousand would take a minute."""
    rows = ["1,giraffe"] * 25 + ["1,girafe"] + [f"1,{number}" for number in range(1000)]
    (tmp_path / "a.csv").write_text("\n".join(["x,label", *rows]))
    made = call("import", "rows", tmp_path / "d", tmp_path / "a.csv", "--validation-share", 0)
    assert (made.code, "1002 labels" in made.output, "meant to be" in made.output) == (0, True, False)


def test_a_file_of_which_no_row_can_be_used_is_refused(tmp_path: Path, call: Call) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 12)
    made = call("import", "text", tmp_path / "d", tmp_path / "a.jsonl", "--skip-unfit")
    assert (made.code, "no row of the training files can be used" in made.output) == (2, True)
    (tmp_path / "b.jsonl").write_text('{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n')
    parts = [tmp_path / "b.jsonl", "--validation", tmp_path / "a.jsonl"]
    made = call("import", "text", tmp_path / "d", *parts, "--skip-unfit")
    assert (made.code, "no row of the validation files can be used" in made.output) == (2, True)


BAD_INPUT: dict[str, tuple[list[str], int, str]] = {
    "an unknown corpus": (["import", "wikipedia", "OUT"], 2, "wikipedia"),
    "an unknown command": (["mine", "OUT"], 2, "mine"),
    "no files": (["import", "text", "OUT"], 2, "FILES is missing: write elastic-train"),
    "a file of another kind": (["import", "text", "OUT", "a.pdf"], 2, "a.pdf: must be one of .jsonl"),
    "an empty text": (["import", "text", "OUT", "EMPTY"], 2, "empty.txt: holds no text"),
    "a missing file": (["import", "text", "OUT", "none.csv"], 2, "none.csv: cannot be read"),
    "too few samples": (["import", "docstrings", "OUT", "--samples", "1"], 2, "--samples must be at least 2"),
    "one of four limits": (
        ["import", "docstrings", "OUT", "--vocabulary", "9"],
        2,
        "error: --vocabulary must be at least",
    ),
    "no libraries": (["import", "docstrings", "OUT", "--site-packages", "FOLDER"], 65, "at least 2 are needed"),
    "rows of another kind": (["import", "rows", "OUT", "a.pdf"], 2, "a.pdf: must be .jsonl, .json, .csv or .tsv"),
    "rows of two kinds": (["import", "rows", "OUT", "a.jsonl", "a.csv"], 2, "a.csv: must be .jsonl or .json"),
    "a share above 1": (
        ["import", "images", "OUT", "FOLDER", "--validation-share", "1.5"],
        2,
        "--validation-share must",
    ),
    "too large a seed": (["import", "images", "OUT", "FOLDER", "--seed", str(1 << 64)], 2, "below 2^64"),
    "no images": (["import", "images", "OUT", "FOLDER"], 2, "holds no images"),
    "no dataset of Hugging Face": (["import", "hf-folder", "OUT", "FOLDER"], 2, "has no split 'train'"),
    "a type that there is not": (["import", "rows", "OUT", "a.csv", "--types", "n=many"], 2, "write column=type"),
    "rows of no tokens": (["pack", "OUT", "a.txt", "--length", "0"], 2, "--length and --open-rows must be at least 1"),
    "nothing to pack": (["pack", "OUT", "FOLDER", "--length", "8"], 2, f"has no {NAME}; name a dataset"),
    "no rows": (["synth", "OUT", "--rows", "0"], 2, "rows is 0"),
    "rows of words": (["synth", "OUT", "--rows", "many"], 2, "many"),
    "a negative seed": (["synth", "OUT", "--seed", "-1"], 2, "seed must be at least 0"),
    "an unknown schema": (["synth", "OUT", "--schema", "prose"], 2, "prose"),
    "nothing to describe": (["describe", "FOLDER"], 2, f"no {NAME} there; make the dataset with"),
    "nothing to verify": (["verify", "FOLDER"], 2, f"no {NAME} there; make the dataset with"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_explained_and_writes_nothing(tmp_path: Path, call: Call, case: str) -> None:
    """2 for what was typed or named, 65 for contents; nothing is written."""
    arguments, code, message = BAD_INPUT[case]
    (tmp_path / "empty.txt").touch()
    places = {"OUT": tmp_path / "out", "EMPTY": tmp_path / "empty.txt", "FOLDER": tmp_path}
    done = call(*(places.get(argument, argument) for argument in arguments))
    assert done.code == code
    assert message in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_an_import_never_overwrites_a_foreign_folder(tmp_path: Path, call: Call) -> None:
    """A folder that holds other work is refused and stays as it is."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("one")
    path = write_texts(tmp_path / "a.jsonl")
    for arguments in (["import", "text", tmp_path / "thesis", path], ["synth", tmp_path / "thesis"]):
        done = call(*arguments)
        assert (done.code, "is not an imported dataset" in done.output) == (2, True)
    assert snapshot(tmp_path / "thesis") == {"chapter.txt": b"one"}


def test_describe_counts(tmp_path: Path) -> None:
    """Rows, labels, missing values and lengths are those of the files."""
    tokens = [[1] * length for length in (0, 15, 16, 31, 32, 5000)]
    for number, part in enumerate((tokens[:4], tokens[4:])):
        columns = {
            "input_ids": pa.array(part, pa.list_(pa.int32())),
            "size": pa.array([None, *range(len(part) - 1)], pa.float64()),
            "label": pa.array([0] * len(part), pa.int32()),
        }
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=3)
    facts = describe(build_manifest(str(tmp_path), label_column="label", labels=("x", "y")))
    assert (facts.rows, facts.files, facts.row_groups, facts.labels) == (6, 2, 3, {"x": 6, "y": 0})
    assert facts.missing == {"input_ids": 0, "size": 2 / 6, "label": 0}
    assert dict(zip(LENGTH_BOUNDS, facts.lengths, strict=True)) == {
        **dict.fromkeys(LENGTH_BOUNDS, 0),
        0: 2,
        16: 2,
        32: 1,
        4096: 1,
    }
    assert facts.mean_length == sum(map(len, tokens)) / 6
    assert facts.size_bytes == sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))


def test_describe_takes_any_dataset(tmp_path: Path) -> None:
    """Labels may be named and not counted, and what is called `input_ids` may be text."""
    pq.write_table(pa.table({"input_ids": ["a", None]}), tmp_path / "a.parquet")
    facts = describe(build_manifest(str(tmp_path), labels=("x", "y")))
    assert (facts.labels, facts.missing, facts.mean_length) == ({}, {"input_ids": 0.5}, None)


def test_describe_prints_tables_and_json(tmp_path: Path, call: Call) -> None:
    """The tables name labels and columns; --json is one object, or a list where there are two parts."""
    write_rows(tmp_path / "both" / "train", 30)
    write_rows(tmp_path / "both" / "validation", 20)
    printed = call("describe", tmp_path / "both" / "train")
    assert (printed.code, [word for word in ("label", "size", "kind", "0-15") if word not in printed.output]) == (0, [])
    one = json.loads(call("describe", tmp_path / "both" / "train", "--json").output.partition("reading")[0])
    assert one["rows"] == sum(one["labels"].values()) == sum(one["lengths"].values()) == 30
    both = json.loads(call("describe", tmp_path / "both", "--json").output.partition("reading")[0])
    assert [facts["rows"] for facts in both] == [30, 20]


def test_describe_names_a_damaged_file(tmp_path: Path, call: Call) -> None:
    """A file that cannot be read ends it with 65, the file and the command that shows more."""
    write_rows(tmp_path / "rows", 30)
    (tmp_path / "rows" / "part-1.parquet").write_bytes(b"PAR1")
    done = call("describe", tmp_path / "rows")
    assert done.code == 65
    assert "part-1.parquet: cannot be read" in done.output
    assert "check with `elastic-train data verify`" in done.output


def test_verify_lists_every_image_that_does_not_decode(tmp_path: Path, call: Call) -> None:
    """The files are whole, and hold what nobody can train on; without --images nobody looks."""
    import_digits(tmp_path / "digits", share=0.1, seed=7)
    table = pq.read_table(next((tmp_path / "digits" / "validation").glob("*.parquet")))
    images = table.column("image").to_pylist()
    images[40], images[90] = images[40][:60], b"GIF89a"
    (tmp_path / "own").mkdir()
    broken = table.set_column(0, "image", pa.array(images))
    pq.write_table(broken, tmp_path / "own" / "a.parquet", row_group_size=64)
    build_manifest(str(tmp_path / "own"))
    assert call("verify", tmp_path / "own").code == 0
    done = call("verify", tmp_path / "own", "--images", "image", "--json")
    assert done.code == 65
    verdicts, _ = json.JSONDecoder().raw_decode(done.output)  # bars follow
    wrong = [verdict["wrong"] for verdict in verdicts if verdict["wrong"]]
    assert [text.partition(":")[0] for text in wrong] == ["row group 0, row 40", "row group 1, row 26"]
    assert all("column 'image' is not an image that can be decoded" in text for text in wrong)


def test_verify_lists_images_beside_what_is_wrong_with_files(tmp_path: Path, call: Call) -> None:
    """Once for each file, and images of whole files; read without these verdicts, no row group hides others."""
    images = pa.array([b"none", b"none"])
    for name in "abc":
        pq.write_table(pa.table({"image": images, "label": [0, 1]}), tmp_path / f"{name}.parquet", row_group_size=1)
    manifest = build_manifest(str(tmp_path))
    longer, cut = tmp_path / "a.parquet", tmp_path / "b.parquet"
    longer.write_bytes(longer.read_bytes() + b"more")
    cut.write_bytes(cut.read_bytes()[:-40])
    done = call("verify", tmp_path, "--images", "image", "--json")
    assert done.code == 65
    verdicts, _ = json.JSONDecoder().raw_decode(done.output)
    wrong = [(verdict["path"].rpartition("/")[2], verdict["wrong"]) for verdict in verdicts if verdict["wrong"]]
    assert [(path, text.partition(":")[0]) for path, text in wrong[2:]] == [
        ("c.parquet", "row group 0, row 0"),
        ("c.parquet", "row group 1, row 0"),
    ]
    assert [path for path, _ in wrong[:2]] == ["a.parquet", "b.parquet"]
    assert all("no format that Pillow knows" in text and "0x" not in text for _, text in wrong[2:])
    alone = verify_images(manifest, "image")
    assert [verdict.path for verdict in alone] == [f"{name}.parquet" for name in "aabbcc"]
    assert not any(".parquet" in str(verdict.wrong) for verdict in alone)


@pytest.mark.parametrize(
    ("column", "why"), [("label", "column 'label' is int64, not binary"), ("imag", "column 'imag' is not there")]
)
def test_only_columns_that_can_hold_images_are_decoded(tmp_path: Path, call: Call, column: str, why: str) -> None:
    """Refused before a file is read."""
    pq.write_table(pa.table({"image": pa.array([b""]), "label": [0]}), tmp_path / "a.parquet")
    build_manifest(str(tmp_path))
    done = call("verify", tmp_path, "--images", column)
    assert done.code == 2
    assert f"{why}; columns that can hold encoded images: image" in done.output
    assert "hashing" not in done.output


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(bytes(content))


def flip_the_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-60] ^= 1
    path.write_bytes(bytes(content))


def write_again(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(1), path)


HARM: dict[Callable[[Path], None], str] = {
    flip_a_byte: "is damaged: row group 1, 'input_ids.list.element', bytes [8",
    flip_the_footer: "its footer changed: the file was written again",
    write_again: "truncated or replaced",
    Path.unlink: "is missing",
}


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_verify_finds_damage(tmp_path: Path, call: Call, harm: Callable[[Path], None]) -> None:
    """One flipped bit, a file written again, one that is gone: 65, that file named, the others whole."""
    folder = write_rows(tmp_path / "rows", 60)
    assert call("verify", folder, "--add-checksums").code == 0
    harm(folder / "part-1.parquet")
    done = call("verify", folder)
    assert done.code == 65
    assert "part-1.parquet" in done.output.splitlines()[-1]
    assert HARM[harm] in done.output.splitlines()[-1]
    verdicts = verify(load_manifest(str(folder)))
    assert [verdict.path for verdict in verdicts if verdict.wrong is None] == ["part-0.parquet", "part-2.parquet", NAME]
    assert HARM[harm] in str(verdicts[1].wrong)


def test_verify_reports_all_damage_as_json(tmp_path: Path, call: Call) -> None:
    """--json lists every file with what is wrong, null where nothing is, and still ends with 65."""
    folder = write_rows(tmp_path / "rows", 60)
    (folder / "part-0.parquet").unlink()
    flip_a_byte(folder / "part-2.parquet")
    done = call("verify", folder, "--json")
    found = {Path(row["path"]).name: row["wrong"] for row in json.loads(done.output.partition("hashing")[0])}
    assert done.code == 65
    assert found == {
        "part-0.parquet": "is missing",
        "part-1.parquet": None,
        "part-2.parquet": found["part-2.parquet"],
        NAME: None,
    }
    assert str(found["part-2.parquet"]).startswith(HARM[flip_a_byte])


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("num_rows", 59, "names 59 rows, but its row groups hold 60"),
        ("label_counts", [1, 2], "its label counts do not add up to its rows"),
        ("coverage", {"count": 60, "sum_a": 1, "sum_b": 2}, "its coverage sums are not those of its rows"),
    ],
)
def test_verify_finds_a_manifest_that_contradicts_itself(tmp_path: Path, field: str, value: object, wrong: str) -> None:
    """Rows, label counts and coverage sums must follow from the row groups."""
    path = write_rows(tmp_path / "rows", 60) / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert verify(load_manifest(str(path.parent)))[-1].wrong == wrong


def test_verify_finds_another_tokenizer(tmp_path: Path, call: Call) -> None:
    """The tokeniser beside the data is part of it."""
    call("import", "text", tmp_path / "out", write_texts(tmp_path / "a.jsonl"))
    with (tmp_path / "out" / "train" / "tokenizer.json").open("a") as file:
        file.write(" ")
    done = call("verify", tmp_path / "out")
    assert (done.code, "is not the tokeniser that the data was made with" in done.output) == (65, True)


@pytest.mark.parametrize("track", [silent, shown])
def test_progress_passes_items_through(track: Callable[..., object], capsys: pytest.CaptureFixture[str]) -> None:
    """Work is not changed by being watched; off a terminal a watcher reads a few lines on standard error."""
    assert list(track(iter(range(10)), "counting", 10)) == list(range(10))  # type: ignore[call-overload]
    out, err = capsys.readouterr()
    assert list(track(iter(range(2)), "reading", 2, "files")) == [0, 1]  # type: ignore[call-overload]
    counted = "reading: 0 of 2 files, 0%\nreading: 1 of 2 files, 50%\nreading: 2 of 2 files, 100%\n"
    assert capsys.readouterr().err == (counted if track is shown else "")
    expected = "".join(f"counting: {part}%\n" for part in (0, 30, 60, 90, 100)) if track is shown else ""
    assert (out, err) == ("", expected)
