"""`train` as a function, in one process and on two ranks: its result, its errors, its files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import PATIENCE_S, begin, places_of, run_source, start
from tests.elastic_train.training.jobs import CLASSIFIER, config, failing, history, result

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, sys
import elastic_train as et
result = et.train(et.load_config(sys.argv[1], {"max_steps": 4, "run.dir": sys.argv[2]}))
if os.environ.get("RANK", "0") == "0":
    print(json.dumps([result.status, result.step, result.weights_sha256, result.coverage.count]), flush=True)
os._exit(0)
"""
COMMAND = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
runpy.run_module("elastic_train.command", run_name="__main__", alter_sys=True)
"""
LEFT = """
import signal, sys
import elastic_train as et
before = signal.getsignal(signal.SIGTERM)
try:
    et.train(sys.argv[1])
except et.Preempted as error:
    print(type(error).__name__, error.exit_code, error)
assert signal.getsignal(signal.SIGTERM) is before
print(et.train(sys.argv[1]).step)
assert signal.getsignal(signal.SIGTERM) is before
"""
REFUSED = """
import sys, threading
import elastic_train as et
for path, overrides in (("missing.yaml", {}), (sys.argv[1], {"epoch": 2}), (sys.argv[1], {"data.train": "nowhere"})):
    try:
        et.train(et.load_config(path, overrides))
    except et.ElasticTrainError as error:
        print(f"{type(error).__name__}: {error}")
def refuse():
    try:
        et.train(sys.argv[1])
    except ValueError as error:
        print("ValueError:", error)
thread = threading.Thread(target=refuse)
thread.start()
thread.join()
"""


def run(program: str, *arguments: str) -> list[str]:
    """Run a program in its own process; return the lines of its stdout."""
    done = run_source(program, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def run_on_two_ranks(script: Path, *arguments: str) -> list[str]:
    """Run a script in the environment that a launcher gives two ranks; return the lines that they print."""
    command, log = [sys.executable, "-m", "tests.source_program", str(script), *arguments], script.with_suffix(".log")
    ranks = [begin(command, log, place) for place in places_of(2)]
    assert [rank.wait(PATIENCE_S) for rank in ranks] == [0, 0], log.read_text()
    return log.read_text().splitlines()


def test_the_function_the_command_and_two_ranks_agree(tmp_path: Path, rows: Path) -> None:
    """The function's result equals the command's, field by field, also for a script on two ranks."""
    described, script = config(tmp_path, rows, CLASSIFIER), tmp_path / "script.py"
    script.write_text(TRAIN)
    assert start([described, "--max-steps", "4"]).code == 0
    expected = json.loads((tmp_path / "run" / "result.json").read_text())
    alone = run(TRAIN, described, str(tmp_path / "alone"))
    two = run_on_two_ranks(script, described, str(tmp_path / "two"))
    for status, step, weights, count in (json.loads(lines[-1]) for lines in (alone, two)):
        assert (status, step, weights) == ("done", 4, expected["weights_sha256"])
        assert count == expected["coverage"]["count"] == 4 * 24


def test_a_request_to_leave_is_raised_and_the_next_call_resumes(tmp_path: Path, rows: Path) -> None:
    """SIGTERM ends the call after a commit with the exit code for a requeue; signal handlers are restored."""
    lines = run(LEFT, config(tmp_path, rows, failing(tmp_path, after=10, how="SIGTERM"), epochs=1))
    printed = [line for line in lines if line.startswith("Preempted")]
    assert printed == ["Preempted 75 asked to leave by SIGTERM; step 3 is committed: the same command resumes from it"]
    assert lines[-1] == "14"


def test_a_task_that_changes_the_working_folder_changes_nothing(tmp_path: Path, rows: Path) -> None:
    """Paths are relative to the folder where the job started, for the result and for `status`."""
    (tmp_path / "moving.py").write_text(
        "import os\nfrom elastic_train.tasks.text_classifier import TextClassifier\n"
        f"os.makedirs({str(tmp_path / 'else')!r}, exist_ok=True)\nos.chdir({str(tmp_path / 'else')!r})\n"
        "class Moving(TextClassifier):\n    def build_model(self):\n"
        f"        os.chdir({str(tmp_path / 'else')!r})\n        return super().build_model()\n"
    )
    (tmp_path / "rows").symlink_to(rows)
    tree = yaml.safe_load(Path(config(tmp_path, rows, CLASSIFIER)).read_text())
    tree["task"]["path"], tree["run"], tree["data"]["train"] = "moving:Moving", {"dir": "run"}, "rows/train"
    tree["tracking"], tree["max_steps"] = {"mlflow_uri": None}, 3
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    for word in ("train", "status"):
        done = run_source(COMMAND, word, "c.yaml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "else").iterdir())
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]["dir"] == "run"


def test_errors_are_raised_and_not_printed(tmp_path: Path, rows: Path) -> None:
    """Each error is in the public hierarchy and names the mistake; a thread that cannot handle signals is refused."""
    described = tmp_path / "config.yaml"
    described.write_text(
        yaml.safe_dump({"data": {"train": str(rows / "train")}, "run": {"dir": str(tmp_path / "run")}})
    )
    missing, unknown, nowhere, thread = run(REFUSED, str(described))
    assert missing.startswith("ConfigError: missing.yaml: cannot be read")
    assert unknown == "ConfigError: overrides: unknown key 'epoch'; did you mean 'epochs'?"
    assert nowhere.startswith(f"ConfigError: {Path('nowhere').absolute()}: no manifest.json there")
    assert thread.startswith("ValueError: signal only works in main thread")


def test_steps_and_validations_without_a_target_are_no_numbers_and_change_nothing(tmp_path: Path, rows: Path) -> None:
    """Weight decay is not applied, early stopping ignores them, and each is reported with its dataset."""
    task = {"path": "tests.tasks:Untargeted", "params": CLASSIFIER["task"]["params"]}  # type: ignore[index]
    validation = {"every": "2 steps", "early_stopping": {"metric": "max auc", "patience": 1}}
    described = config(tmp_path, rows, {**CLASSIFIER, "task": task, "validation": validation, "max_steps": 6})
    done = start([described])
    assert done.code == 0, done.output
    found = result(tmp_path)
    assert found["step"] == 6 and found["skipped_steps"] == [[0, 6]] and found["ended_by"] == "last step"
    assert found["metrics"]["loss"] is None and found["metrics"]["auc"] is None  # type: ignore[index]
    assert found["improvement"]["best"] is None and found["improvement"]["num_since"] == 0  # type: ignore[index]
    assert {line["loss"] for line in history(tmp_path, "step")} == {None}
    assert done.output.count("no sample of it has a target, in data.train") == 1
    assert done.output.count(f"WARNING: data.validation {rows / 'validation'}: no sample") == 1
    assert "loss is no number" in done.output
