"""The SkyPilot task: read by SkyPilot's own parser, which refuses typos, and understood by the launcher it starts."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from elastic_train.cli.main import app
from elastic_train.config import sources
from elastic_train.errors import HungError, Preempted
from elastic_train.launch.options import Flags, Launch, resolve
from tests.conftest import ROOT
from tests.deploy.manifests import places, with_typo
from tests.deploy.pages import command

pytestmark = pytest.mark.deploy
TASK = yaml.safe_load((ROOT / "deploy" / "skypilot" / "train.yaml").read_text())
VARIABLE = "ELASTIC_TRAIN_SKYPILOT"
INSTALLED = ROOT / ".venv" / "skypilot"
OPEN = (("envs",), ("resources", "accelerators"), ("resources", "job_recovery"))
"""Whose keys are ours, or which SkyPilot 0.14 does not look at: what it has read of these is compared."""
READ = """
import json, sys
import sky
for task in json.load(sys.stdin):
    try:
        made = sky.Task.from_yaml_config(task)
        (one, *_) = made.resources
        print(json.dumps([made.num_nodes, one.use_spot, one.job_recovery, len(list(made.resources))]))
    except Exception as error:
        print(json.dumps(str(error)))
"""


@functools.cache
def python_with_skypilot() -> str:
    """Return a Python that has SkyPilot, whose requirements are too many for one environment with ours."""
    if given := os.environ.get(VARIABLE):
        return given
    if (INSTALLED / ".installed").exists():
        return str(INSTALLED / "bin" / "python")
    if importlib.util.find_spec("sky") is None:
        pytest.skip(f"no SkyPilot here: make skypilot, or the Python of an environment that has it in {VARIABLE}")
    return sys.executable


def read_by_skypilot(tasks: list[Any], home: Path) -> list[Any]:
    """Return for each task what SkyPilot makes of it: nodes, spot, recovery, kinds of machines; or its refusal."""
    environ = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [python_with_skypilot(), "-c", READ]
    done = subprocess.run(
        command, input=json.dumps(tasks), cwd=home, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_skypilots_parser_takes_it_and_no_typo(tmp_path: Path) -> None:
    """Spot machines of two kinds, recovered; an unknown key anywhere is refused."""
    task = {key: value for key, value in TASK.items() if key != "workdir"}  # which has to exist where it is read
    spoilt = [with_typo(task, path) for path in places(task) if path not in OPEN]
    assert len(spoilt) == 2
    taken, *refused = read_by_skypilot([task, *spoilt], tmp_path)
    nodes, is_spot, recovery, kinds = taken
    assert (nodes, is_spot, kinds) == (4, True, 2)
    again = [Preempted.exit_code, HungError.exit_code]  # with other codes it would be the same again
    assert (recovery["strategy"], recovery["recover_on_exit_codes"]) == ("EAGER_NEXT_REGION", again)
    assert recovery == TASK["resources"]["job_recovery"] and recovery["max_restarts_on_errors"] == 0
    assert [answer for answer in refused if not isinstance(answer, str)] == []


def test_skypilots_own_command_line_takes_the_pages_command(tmp_path: Path) -> None:
    """It names the task of this project, and a variable that the task has."""
    _, (program, group, *words) = command("skypilot.md", "sky jobs launch")
    assert (program, group) == ("sky", "jobs")
    read = (
        "import json, sys; from sky.client.cli.command import jobs_launch as found; "
        "print(json.dumps(found.make_context('launch', sys.argv[2:]).params, default=str))"
    )
    environ = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    asked = [python_with_skypilot(), "-c", read, *words]
    done = subprocess.run(asked, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout)
    assert parsed["entrypoint"] == ["deploy/skypilot/train.yaml"] and (ROOT / parsed["entrypoint"][0]).is_file()
    (variable,) = parsed["env"]
    assert variable[0] in TASK["envs"]


UV = """#!/bin/sh
printf '%s\\n' "$@" > "$HOME/$1"
"""


def set_up(folder: Path, wheel: str, sudo: str = "exit 0") -> tuple[int, list[str], list[str]]:
    """Run the task's setup, with stand-ins for what needs root or a network; return its code, and what uv was given."""
    home = folder / "home"
    for program, source in ((home / ".local" / "bin" / "uv", UV), (folder / "bin" / "sudo", f"#!/bin/sh\n{sudo}\n")):
        program.parent.mkdir(parents=True)
        program.write_text(source)
        program.chmod(0o755)
    (folder / "workdir").mkdir()
    (folder / "workdir" / TASK["envs"]["WHEEL"]).touch()
    environ = {"HOME": str(home), "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "WHEEL": wheel}
    done = subprocess.run(["bash", "-c", TASK["setup"]], cwd=folder / "workdir", env=environ, check=False)
    given = [home / command for command in ("venv", "pip")]
    venv, pip = (path.read_text().splitlines() if path.exists() else [] for path in given)
    return done.returncode, venv, pip


@pytest.mark.parametrize(
    "wheel", [TASK["envs"]["WHEEL"], "https://example.com/releases/elastic_train-9.9-py3-none-any.whl"]
)
def test_it_installs_the_wheel_with_a_python_that_is_new_enough(wheel: str, tmp_path: Path) -> None:
    """From the workdir or from a URL, with the extra for the bucket, into the folder that the task runs from."""
    code, venv, pip = set_up(tmp_path, wheel)
    assert code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = f"{tmp_path}/home/elastic-train"
    assert venv == ["venv", "--python", project["requires-python"], environment]
    assert pip[:-1] == ["pip", "install", "--python", f"{environment}/bin/python"]
    asked = Requirement(pip[-1])
    assert (asked.name, asked.extras) == (project["name"], {"s3"})
    assert asked.extras <= project["optional-dependencies"].keys()
    assert asked.url == (wheel if "://" in wheel else f"file://{tmp_path}/workdir/{wheel}")


def test_the_wheel_that_it_names_is_this_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version, *_ = parse_wheel_filename(TASK["envs"]["WHEEL"])
    assert (name, str(version)) == (project["name"], project["version"])
    _, words = command("skypilot.md", "cp dist/")
    assert words == ["cp", f"dist/{TASK['envs']['WHEEL']}", TASK["workdir"]]


@pytest.mark.parametrize(("wheel", "sudo"), [("another.whl", "exit 0"), (TASK["envs"]["WHEEL"], "exit 100")])
def test_a_setup_that_fails_installs_nothing(wheel: str, sudo: str, tmp_path: Path) -> None:
    """A wheel that was not uploaded, or no etcd: SkyPilot sees a code that is not 0."""
    code, venv, pip = set_up(tmp_path, wheel, sudo)
    assert code != 0
    assert (venv, pip) == ([], [])


def launch_on(rank: int) -> Launch:
    """Return what the launcher of a node makes of the task's command and of SkyPilot's variables."""
    program, command, *words = shlex.split(TASK["run"].replace("$BUCKET", TASK["envs"]["BUCKET"]))[1:]
    assert (program, command) == ("~/elastic-train/bin/elastic-train", "launch")
    _, bound, _ = app.parse_args(["launch", *words], exit_on_error=False, print_error=False)
    given = dict(bound.arguments)
    environ = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_train_7-0",
    }
    return resolve(given["config"], given["overrides"], given.get("flags", Flags()), environ, num_gpus=8)


def test_its_nodes_meet_on_the_first_of_them(tmp_path: Path) -> None:
    """Any number of them trains, and what follows the flags are keys of the configuration."""
    first, last = launch_on(0), launch_on(3)
    assert (first.min_nodes, first.max_nodes, first.ranks, first.is_etcd_host) == (1, 4, 8, True)
    assert (last.is_etcd_host, last.etcd_address, last.run_id) == (False, "10.0.0.1", first.run_id)
    assert not first.warnings and not last.warnings
    (tmp_path / "train.yaml").write_text("run: {dir: runs}\ndata: {train: rows}\n")
    config = sources.load(tmp_path / "train.yaml", environ={}, arguments=first.overrides)
    assert (config.checkpoint.url, config.checkpoint.every_s) == (TASK["envs"]["BUCKET"], 60.0)
