"""`elastic-train --help`: every command has a line, and none of them is imported for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts import App

from elastic_train.cli import main
from elastic_train.cli.output import PIPE_CLOSED
from elastic_train.config.schema import keys
from elastic_train.launch.options import Flags

PROGRAM = """
import sys
from elastic_train.cli.main import main
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write(str([name for name in ("torch", "pyarrow") if name in sys.modules]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["nothing", "help"])
def test_every_command_has_a_line_in_its_group(arguments: list[str]) -> None:
    """At 80 columns each summary is one line, and every group is complete."""
    environ = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == "[]", done.stderr
    titles = re.findall(r"^╭─ (.+?) ─+╮$", done.stdout, re.MULTILINE)
    assert titles == ["Commands", "Train", "Look at runs", "Data and models", "Places"]
    lines = [line.removeprefix("│ ") for line in done.stdout.splitlines() if line.startswith("│ ")]
    assert {line.split()[0] for line in lines if not line.startswith("-")} == {
        name for name in main.app if not name.startswith("-")
    }
    assert not [line for line in lines if line.startswith(" ")], "a summary has a second line"


def _commands(app: App, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    for name in app:
        if not name.startswith("-"):
            yield from _commands(app[name], *path, name)


@pytest.mark.slow
def test_no_command_has_a_flag_that_only_repeats_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither --empty-files nor --no-replace; and no part of a text is lost as if it were markup."""
    found = {}
    for path in _commands(main.app):
        main.app([*path, "--help"], result_action="return_value")
        text = capsys.readouterr().out
        flags = [line for line in text.splitlines() if re.search(r"--empty-|--\S+ +--no-\S+ .*default: False", line)]
        found |= {path: flags} if flags or "//" in text.replace("://", "") else {}
    assert not found


def test_the_flags_of_launch_are_explained_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    main.app(["launch", "--help"], result_action="return_value")
    text = capsys.readouterr().out
    assert re.findall(r"╭─ (.+?) ─+╮", text) == ["Parameters", "Job", "Faults", "Network"]
    flags = [line for line in text.splitlines() if line.startswith("│ --")]
    assert len(flags) == len(fields(Flags)) and all(re.search(r"  [A-Za-z]{3}", line) for line in flags), flags


@pytest.mark.slow
def test_subcommands_have_a_line_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lists = 0
    for path in [path for path in _commands(main.app) if path]:
        main.app([*path, "--help"], result_action="return_value")
        for listed in re.findall(r"╭─ Commands ─+╮\n(.*?)╰", capsys.readouterr().out, re.DOTALL):
            lists += 1
            assert not [line for line in listed.splitlines() if line.startswith("│   ")], path
    assert lists >= 5


def test_each_command_with_another_name_says_what_to_type_today(capsys: pytest.CaptureFixture[str]) -> None:
    """No name of today is in the table, and each successor is a command of today."""
    today = {" ".join(path) for path in _commands(main.app)}
    for name, successor in main.RENAMED.items():
        assert name not in today
        with pytest.raises(SystemExit) as ended:
            main.main([*name.split(), "runs/first"])
        assert ended.value.code == 2 and f"`{name}` is now `{successor}`" in capsys.readouterr().err
        assert any(f"{successor} ".startswith(f"{command} ") for command in today - {""}), successor


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", "config.yaml"], 'Unknown command "trian". Did you mean "train"?'),
        (["ckpt", "prunee", "RUN"], 'Unknown command "prunee". Did you mean "prune"?'),
        (["init"], "KIND is missing: write elastic-train init KIND FOLDER. See elastic-train init --help"),
        (
            ["predict", "RUN"],
            "--data DATA is missing: write elastic-train predict RUN --data DATA --out OUT. See elastic-train",
        ),
        (["ckpt", "pin", "RUN"], "COMMIT is missing: write elastic-train ckpt pin RUN COMMIT."),
        (["init", "--kind"], "parameter --kind requires an argument"),
    ],
)
def test_an_argument_that_is_missing_is_named_as_help_names_it(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(arguments)
    assert ended.value.code == 2 and said in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize("command", ["init text PLACE", "data synth PLACE --rows 4", "data import images OUT PLACE"])
def test_a_place_that_cannot_be_used_is_named_in_a_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By any command: one that writes below a file, and one that reads a folder that is none."""
    (tmp_path / "file").write_text("")
    place = str(tmp_path / "file" / "folder")
    words = [{"PLACE": place, "OUT": str(tmp_path / "out")}.get(word, word) for word in command.split()]
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 1
    assert re.match(rf"error: {tmp_path}/file[^:]*: (Not a directory|File exists); name another place", said), said


@pytest.mark.parametrize("is_closed", [False, True], ids=["its reader has gone", "closed"])
def test_output_that_nobody_reads_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch, is_closed: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", None if is_closed else pipe)
        with pytest.raises(SystemExit) as ended:
            main.main(["keys", "--json"])
        assert ended.value.code == (0 if is_closed else PIPE_CLOSED)


@pytest.mark.slow
def test_the_installed_command_says_nothing_of_a_reader_that_has_gone() -> None:
    """It said that training continues, whatever the command."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "elastic_train.command", "keys", "--json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, "")


def test_keys_are_listed_as_a_file_has_them_with_brackets_in_their_meanings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An extra's name in brackets was taken for markup, and left out."""
    with pytest.raises(SystemExit) as ended:
        main.main(["keys", "tracking.tensor"])
    first, *meaning = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0 and first == "tracking.tensorboard = false  (bool)"
    words = " ".join(" ".join(meaning).split())
    assert words == "Also write TensorBoard event files to run.dir/tensorboard. Needs the extra [tensorboard]."


@pytest.mark.parametrize(
    ("key", "kind", "default"),
    [
        ("run.name", "str | null", "null"),
        ("compile", "true | false | auto", "auto"),
        ("data.mixture[].weight", "float", "required"),
        ("optimizer.ema_decay", "float | null", "null"),
        ("validation.early_stopping", "section | null", "null"),
        ("profile.ranks", "list of int | all", "[0]"),
    ],
)
def test_types_and_defaults_of_keys_are_those_of_a_file(key: str, kind: str, default: str) -> None:
    assert {row[0]: row[1:3] for row in keys()}[key] == (kind, default)


def test_a_part_that_no_key_has_is_refused_with_the_nearest_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["keys", "learning_rate"])
    assert ended.value.code == 2
    assert "no key has 'learning_rate' in its name; did you mean 'optimizer.lr'?" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_that_look_at_a_run_do_not_load_torch() -> None:
    """On a busy machine it takes half a minute, and people ask about jobs on busy machines."""
    looks = "from elastic_train.cli import audit, checkpoints; from elastic_train.cli.runs import report, status, top"
    code = f"import sys; {looks}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
