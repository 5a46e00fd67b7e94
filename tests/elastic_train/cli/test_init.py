"""`elastic-train init`: what it writes trains at once, and is never written over something else."""

from __future__ import annotations

import errno
import json
import shlex
from pathlib import Path

import pytest
import yaml

from elastic_train.cli.main import main
from elastic_train.config.schema import Config
from elastic_train.config.sources import load_config
from elastic_train.data.tables.digits import import_digits
from tests.conftest import ROOT, Finished, run_source, write_rows
from tests.test_docs import code_of

pytestmark = pytest.mark.slow

COMMAND = """
import sys
sys.path.insert(0, ".")
from elastic_train.cli.main import main
main(sys.argv[1:])
"""


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    with pytest.raises(SystemExit) as ended:
        main(["init", *map(str, arguments)])
    out, err = capsys.readouterr()
    return Finished(int(ended.value.code or 0), out + err)


def typed(line: str, cwd: Path) -> str:
    """Run a line of `elastic-train` in a folder, as it stands; return what it says."""
    words = shlex.split(line, comments=True)
    assert words[0] == "elastic-train"
    done = run_source(COMMAND, *words[1:], cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_section_of_the_tutorial_on_images_trains(tmp_path: Path) -> None:
    """From `init` to the exported weights, all but the launch; more than nine of ten digits are recognised."""
    section = (ROOT / "docs" / "images.md").read_text().partition("## 1.")[2].partition("## 2.")[0]
    lines = [line for line in code_of(section) if "elastic-train " in line and " launch " not in line]
    assert [line.split()[1] for line in lines] == ["init", "data", "train", "compare", "audit", "export"]
    folder = tmp_path
    for line in lines:
        said = typed(line.replace("runs/two", "runs/first"), folder)
        if " init " in line:
            assert said.splitlines()[0] == "cd digits"
            folder = tmp_path / "digits"
    ended = json.loads((folder / "runs" / "first" / "result.json").read_text())
    assert ended["metrics"]["accuracy"] > 0.9
    assert (folder / "digits.safetensors").stat().st_size > 100_000


def test_a_text_starter_trains_on_data_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The configuration names the dataset by its whole path; without a validation set it says so."""
    write_rows(tmp_path / "rows" / "train", 60)
    done = call(capsys, "text", tmp_path / "made", "--data", tmp_path / "rows")
    assert (done.code, done.output.splitlines()) == (0, [f"cd {tmp_path / 'made'}", "elastic-train train config.yaml"])
    tree = yaml.safe_load((tmp_path / "made" / "config.yaml").read_text())
    assert Config.model_validate(tree).data.train == str(tmp_path / "rows" / "train")
    assert tree["data"]["validation"] is None
    typed("elastic-train train config.yaml --task.params.vocabulary 64 --max_steps 2", tmp_path / "made")
    assert (tmp_path / "made" / "runs" / "first" / "result.json").exists()


def test_the_command_finds_a_task_in_the_working_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As installed, where Python does not look there; the commands after a training failed without PYTHONPATH."""
    write_rows(tmp_path / "rows" / "train", 60)
    assert call(capsys, "text", tmp_path / "made", "--data", tmp_path / "rows").code == 0
    program = (
        "import os, sys; sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd())]\n"
        "from elastic_train.command import main; main()"
    )
    words = ("validate", "config.yaml", "--task.params.vocabulary", "64")
    done = run_source(program, *words, cwd=tmp_path / "made")
    assert done.returncode == 0, done.stderr


def test_texts_that_are_no_tokens_yet_are_refused_with_the_command_that_makes_them_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained, they were refused later, and nothing said how they become tokens."""
    (tmp_path / "reviews.csv").write_text("text,label\n" + "good item,1\nbad item,0\n" * 20)
    typed("elastic-train data import rows rows reviews.csv", tmp_path)
    done = call(capsys, "text", tmp_path / "made", "--data", tmp_path / "rows")
    assert done.code == 65 and "by `elastic-train data import text OUT FILES`, which trains a tokenizer" in done.output
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["trial #1", "a: b", "it's {here}", "null", "\u00e9 & co", "long " * 40])
def test_a_dataset_and_a_folder_may_have_any_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Cut at ' #', the configuration would name another dataset; the first command is one that a shell can take."""
    write_rows(tmp_path / name / "train", 60)
    done = call(capsys, "text", tmp_path / "made" / name, "--data", tmp_path / name)
    assert shlex.split(done.output.splitlines()[0]) == ["cd", str(tmp_path / "made" / name)]
    found = load_config(tmp_path / "made" / name / "config.yaml")
    assert (found.data.train, found.data.validation) == (str(tmp_path / name / "train"), None)


def test_a_language_model_starts_from_documents_that_are_packed(tmp_path: Path) -> None:
    """As its own lines say it, but for fewer texts and steps."""
    said = typed(f"elastic-train init lm {tmp_path / 'made'}", tmp_path)
    _, imported, packed, train = said.splitlines()
    write_rows(tmp_path / "made" / "texts" / "train", 60)
    write_rows(tmp_path / "made" / "texts" / "validation", 20)
    assert imported == "elastic-train data import docstrings texts --samples 2000"
    typed(packed, tmp_path / "made")
    typed(f"{train} --task.params.model.vocabulary 64 --max_steps 2", tmp_path / "made")
    assert (tmp_path / "made" / "runs" / "first" / "result.json").exists()


def test_a_fine_tuning_names_the_users_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands and the configuration have its whole path; with data of one's own there is nothing to make."""
    model = tmp_path / "my model"
    model.mkdir()
    done = call(capsys, "sft", tmp_path / "made", "--model", model)
    assert (done.code, f"--model {model}: is not the folder of a model of transformers" in done.output) == (2, True)
    (model / "config.json").write_text("{}")
    lines = call(capsys, "sft", tmp_path / "made", "--model", model).output.splitlines()
    assert f"elastic-train data import rows chats chats.jsonl --tokenizer '{model}' --max-tokens 1024" in lines
    for number, positions in enumerate(({"max_position_embeddings": 512}, {"text_config": {"n_positions": 512}})):
        (model / "config.json").write_text(json.dumps(positions))
        short = call(capsys, "sft", tmp_path / f"short-{number}", "--model", model).output
        assert "--max-tokens 512" in short and "--length 512" in short and "1024" not in short
        assert load_config(tmp_path / f"short-{number}" / "config.yaml").task.params["max_tokens"] == 512
    (model / "config.json").write_text("{")
    assert "config.json: cannot be read" in call(capsys, "sft", tmp_path / "broken", "--model", model).output
    (model / "config.json").write_text("{}")
    assert lines[-1] == "elastic-train train config.yaml" and [*(tmp_path / "made").iterdir()] == [
        tmp_path / "made" / "config.yaml"
    ]
    write_rows(tmp_path / "rows" / "train", 60)
    assert call(capsys, "sft", tmp_path / "own", "--data", tmp_path / "rows").code == 2
    done = call(capsys, "sft", tmp_path / "own", "--data", tmp_path / "rows", "--model", model)
    assert done.output.splitlines() == [f"cd {tmp_path / 'own'}", "elastic-train train config.yaml"]
    found = load_config(tmp_path / "own" / "config.yaml")
    assert (found.task.params["hf"], found.optimizer.lr) == ({"path": str(model)}, 2e-4)
    done = call(capsys, "lm", tmp_path / "lm", "--model", model)
    assert (done.code, "--model is for init sft; init lm trains a model of its own" in done.output) == (2, True)


def test_the_trial_of_a_fine_tuning_keeps_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chats of the user's, which it had overwritten, and a model; the rate of random weights is not the template's."""
    pytest.importorskip("transformers")
    lines = call(capsys, "sft", tmp_path).output.splitlines()
    assert lines[-1] == "elastic-train train config.yaml --optimizer.lr 5.0e-3"
    assert load_config(tmp_path / "config.yaml").optimizer.lr == 2e-4
    (tmp_path / "chats.jsonl").write_text("mine\n")
    trial = (tmp_path / "trial.py").read_text()
    done = run_source(trial, cwd=tmp_path)
    assert (done.returncode, "chats.jsonl: exists already, and stays" in done.stdout) == (0, True), done.stderr
    assert (tmp_path / "chats.jsonl").read_text() == "mine\n"
    again = run_source(trial, cwd=tmp_path)
    assert (again.returncode, "base exists already: remove it" in again.stderr) == (1, True)


@pytest.mark.parametrize("kind", ["text", "lm", "images", "sft"])
def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    assert call(capsys, kind, tmp_path / "made").code == 0
    Config.model_validate(yaml.safe_load((tmp_path / "made" / "config.yaml").read_text()))
    (tmp_path / "made" / "config.yaml").write_text("mine")
    done = call(capsys, kind, tmp_path / "made")
    assert (done.code, "config.yaml, " in done.output, "already there" in done.output) == (2, True, True)
    assert (tmp_path / "made" / "config.yaml").read_text() == "mine"


def test_what_cannot_be_begun_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = call(capsys, "images", tmp_path / "made", "--data", tmp_path)
    assert (done.code, f"{tmp_path}/train: no manifest.json there" in done.output) == (2, True)
    assert not (tmp_path / "made").exists()
    assert call(capsys, "sounds", tmp_path / "made").code == 2


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Path, "write_text", write)
    done = call(capsys, "images", tmp_path / "made")
    assert (done.code, list((tmp_path / "made").iterdir())) == (1, [])
    assert done.output == (
        f"error: {tmp_path}/made: cannot write: No space left on device; make room there, or name another folder\n"
    )


def test_images_of_ones_own_are_colour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_digits(tmp_path / "rows", share=0.1, seed=7)
    assert call(capsys, "images", tmp_path / "made", "--data", tmp_path / "rows").code == 0
    tree = yaml.safe_load((tmp_path / "made" / "config.yaml").read_text())
    assert (tree["task"]["params"]["channels"], tree["data"]["validation"]) == (
        3,
        str(tmp_path / "rows" / "validation"),
    )
