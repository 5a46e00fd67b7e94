"""What flags of model commands name is checked before a model is loaded."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from elastic_train.cli.main import main
from elastic_train.data.dataset.manifest import load_manifest
from elastic_train.data.tables.texts import Options, import_text
from elastic_train.errors import ConfigError
from elastic_train.inference.given_places import check_new, check_parquet, find_dataset
from tests.elastic_train.data.chats.chat_tokenizers import CHATML, save_tokenizer


def elastic_train(*arguments: object) -> None:
    """Run a command that succeeds."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    assert not ended.value.code


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run's folder with a training set of texts, `data/train`; no commits."""
    rows = [{"text": f"the row {number}", "label": str(number % 2)} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    import_text(tmp_path / "data", {"train": [tmp_path / "rows.jsonl"]}, Options(vocabulary=512))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("data: {train: data/train}\n")
    return str(tmp_path / "run")


def test_a_file_is_imported_by_a_command_that_fits_the_run(run: str, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("text\na\n")
    flags = f"{tmp_path}/new {tmp_path}/new.csv --tokenizer {tmp_path}/data/train/tokenizer.json --validation-share 0"
    with pytest.raises(ConfigError) as said:
        find_dataset(run, f"{tmp_path}/new.csv")
    assert f"`elastic-train data import rows {flags}`, and name {tmp_path}/new" in str(said.value)


@pytest.mark.slow
@pytest.mark.xdist_group("transformers")
def test_chats_are_imported_and_packed_as_those_of_the_run(tmp_path: Path) -> None:
    """The commands work as printed: the model's tokenizer, the set's own template, and packed rows of the same size."""
    pytest.importorskip("transformers")
    model, chats = save_tokenizer(tmp_path / "model", None), tmp_path / "chats.jsonl"
    (tmp_path / "own.jinja").write_text(CHATML)
    turns = [{"role": role, "content": f"say {role}"} for role in ("user", "assistant")]
    chats.write_text("".join(json.dumps({"messages": turns[:1] * n + turns}) + "\n" for n in range(1, 9)))
    elastic_train(
        "data",
        "import",
        "rows",
        tmp_path / "raw",
        chats,
        "--tokenizer",
        model,
        "--chat-template",
        tmp_path / "own.jinja",
    )
    elastic_train("data", "pack", tmp_path / "data", tmp_path / "raw", "--length", 256)
    (tmp_path / "run").mkdir()
    task = {"params": {"max_tokens": 256, "hf": {"path": "model"}}}
    (tmp_path / "run/config.yaml").write_text(json.dumps({"data": {"train": "data/train"}, "task": task}))
    with pytest.raises(ConfigError) as said:
        find_dataset(str(tmp_path / "run"), str(chats))
    for command in re.findall("`elastic-train (.*?)`", str(said.value)):
        elastic_train(*shlex.split(command))
    made = str(said.value).rpartition("name ")[2]
    assert find_dataset(str(tmp_path / "run"), made) == f"{made}/train"
    template = Path(made, "train/chat_template.jinja")
    assert template.read_text() == CHATML and f"--tokenizer {model} " in str(said.value)
    assert load_manifest(f"{made}/train").columns == load_manifest(str(tmp_path / "data/train")).columns
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match=rf"--tokenizer {tmp_path}/data/train/tokenizer\.json --chat-template"):
        find_dataset(str(tmp_path / "run"), str(chats))


def test_the_only_part_of_an_import_is_taken(run: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert find_dataset(run, f"{data}/train") == f"{data}/train"
    with pytest.raises(ConfigError, match=r"in its parts: name .*train or .*validation"):
        find_dataset(run, str(data))
    (data / "validation").rename(tmp_path / "held")
    assert find_dataset(run, str(data)) == f"{data}/train"
    with pytest.raises(ConfigError, match=r"nowhere: no manifest\.json there; make the dataset"):
        find_dataset(run, f"{tmp_path}/nowhere")


def test_a_name_is_new_and_of_the_format(tmp_path: Path) -> None:
    for name in ("p.parquet", "p", "step.5"):
        check_parquet(tmp_path / name)
    with pytest.raises(ConfigError, match=r"name it .*p\.parquet"):
        check_parquet(tmp_path / "p.csv")
    (tmp_path / "p.parquet").touch()
    for check in (check_parquet, check_new):
        with pytest.raises(ConfigError, match="exists already"):
            check(tmp_path / "p.parquet")
