"""The documentation names only what exists, and no page or message has a phrase of the list in `make check`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from chaos.cli import app as chaos_app
from elastic_train.cli.main import app as train_app
from elastic_train.config.schema import keys
from tests.conftest import ROOT
from tests.deploy.pages import PAGES as PAGES_OF_PLACES
from tests.deploy.pages import commands
from tests.release.words import EVERYWHERE, in_code, in_text

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs/guides").glob("*.md"),
        *(ROOT / "docs/operations").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    )
}
"""Without the decisions, which use the names of their time."""
APPS = {"elastic-train": train_app, "elastic-chaos": chaos_app}
FOLDERS = "benchmarks|chaos|configs|docs|elastic_train|evidence|examples|rendezvous|tests"
KEYS = {name for name, *_ in keys()}
TAKE_KEYS = {"train", "validate", "launch", "status", "plan", "calibrate"}
"""Commands that accept any configuration key after their configuration."""
OPTIONS_OF_KEYS = {f"--{key.replace('_', '-')}" for key in KEYS} | {f"--{key}" for key in KEYS}


def code_of(page: str) -> Iterator[str]:
    """Yield the lines of code of a page (blocks and text between backticks), with continued lines joined."""
    text = page.replace("\\\n", " ")
    fenced = re.compile(r"^ *```.*?\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)
    for block in fenced.findall(text):
        yield from block.splitlines()
    text = fenced.sub("", text)
    yield from re.findall(r"^ {4}(\S.*)$", text, flags=re.MULTILINE)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text))


CODE = {name: list(code_of(page)) for name, page in PAGES.items()}


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].split()) <= 600


@pytest.mark.parametrize("name", PAGES)
def test_named_files_and_modules_exist(name: str) -> None:
    missing = []
    for path in re.findall(rf"(?<![\w/.:-])((?:{FOLDERS})/[\w./*-]*\w)", PAGES[name]):
        missing += [] if list(ROOT.glob(path)) else [path]
    for path in re.findall(r"`(\w+\.py)`", PAGES[name]):
        missing += [] if list(ROOT.glob(f"[a-z]*/**/{path}")) else [path]
    for module in re.findall(rf"python -m ((?:{FOLDERS})[\w.]*\w)", PAGES[name]):
        file = ROOT / module.replace(".", "/")
        missing += [] if file.with_suffix(".py").exists() or (file / "__main__.py").exists() else [module]
    assert not missing


@pytest.mark.parametrize("name", [name for name, lines in CODE.items() if any("make " in line for line in lines)])
def test_named_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {found for line in CODE[name] for found in re.findall(r"^make ([a-z-]+)", line)}
    assert named <= targets


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name, lines in CODE.items() if any("elastic-" in line for line in lines)])
def test_named_commands_and_options_exist(name: str) -> None:
    wrong = []
    for line in CODE[name]:
        for program, rest in re.findall(r"(elastic-train|elastic-chaos) ([^#;]*)", line):
            words = re.sub(r'"[^"]*"', '""', rest).split()  # quoted words belong to another command
            wrong += [f"{program} {rest}: {what}" for what in unknown(APPS[program], words)]
    assert not wrong


def unknown(app: App, words: list[str]) -> Iterator[str]:
    """Yield the words of a command line that name no command, option or configuration key."""
    while words and not words[0].startswith("-") and app.default_command is None:
        if (command := words.pop(0).rstrip(".,")) not in app:
            yield from [command] if command.isalpha() and command.islower() else []
            return
        app = app[command]
    if words and not words[0].startswith("-") and words[0] in app:
        app = app[words.pop(0)]  # also for a command that runs without a subcommand
    known = {"--help", "--version", "--install-completion", *(OPTIONS_OF_KEYS if app.name[0] in TAKE_KEYS else ())}
    if app.default_command is not None:
        known |= {option for argument in app.assemble_argument_collection() for option in argument.names}
    for word in words:
        option = re.match(r"--[a-z][\w.-]*\w", word)
        if option and option[0] not in known:
            yield option[0]


@pytest.mark.parametrize("name", PAGES)
def test_named_configuration_keys_exist(name: str) -> None:
    sections = "|".join({key.partition(".")[0] for key in KEYS if "." in key})
    named = {found for line in CODE[name] for found in re.findall(rf"^((?:{sections})\.\w+)(?:$|[:=] )", line)}
    assert named - KEYS <= {"run.py", "task.py", "optimizer.step"}


def test_every_command_on_a_page_about_a_place_is_taken_from_it_by_a_test() -> None:
    """Other programs' commands are run, or parsed by the program itself; ours are tested above."""
    literals = {
        node.value
        for path in (ROOT / "tests" / "deploy").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 7
    }
    every = [line for page in PAGES_OF_PLACES for line in commands(page)]
    foreign = [line for line in every if not line.startswith("elastic-train ")]
    assert len(foreign) >= 12
    assert [line for line in foreign if not any(line.startswith(literal) for literal in literals)] == []


def test_what_is_wrong_is_found() -> None:
    assert list(unknown(train_app, ["launch", "CONFIG", "--rank", "2", "--batch.micro-batch", "8"])) == ["--rank"]
    assert list(unknown(train_app, ["ckpt", "list", "RUN"])) == ["list"]
    assert list(unknown(chaos_app, ["run", "soak", "--minute", "480", "--set", "batch.micro_batch=8"])) == ["--minute"]


PATH = Path("elastic_train/a.py")


def test_a_phrase_in_a_message_is_refused_with_its_line_and_what_to_write() -> None:
    source = 'def f():\n    """Train on beside it."""\n    raise ValueError(\n        "rank 1 goes on"\n    )\n'
    assert [*in_code(source, PATH)] == ["elastic_train/a.py:4: 'goes on': write continue, resume, run"]


def test_phrases_that_are_refused_everywhere_are_found_in_docstrings_comments_and_pages() -> None:
    found = [*in_code('"""Nodes that are let in."""\n\nX = 1  # it was mended\n', PATH)]
    assert [line.partition(": write")[0] for line in found] == [f"{PATH}:1: 'let in'", f"{PATH}:3: 'mended'"]
    [line] = in_text("ranks\nhave theirs\n", Path("docs/a.md"), 1, EVERYWHERE)
    assert line == "docs/a.md:2: 'have theirs': write the noun: have their shards"


def test_names_and_keys_are_no_messages() -> None:
    assert [*in_code('BESIDE = "beside"\nbefalls_all = 1\n', PATH)] == []
