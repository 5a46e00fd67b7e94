"""Tests run in processes that are forked when all is collected, and nothing that happens there is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

TESTS = """
import os, warnings
import pytest

together = []

@pytest.mark.xdist_group("one process")
@pytest.mark.parametrize("number", range(5))
def test_a_group_is_in_one_process_and_in_order(number):
    together.append(number)
    assert together == list(range(number + 1))

@pytest.mark.slow
def test_what_is_written_is_captured(tmp_path, capfd):
    os.system(f"echo {tmp_path}")
    assert capfd.readouterr().out == f"{tmp_path}\\n"

@pytest.mark.slow
def test_fails():
    print("before it failed")
    warnings.warn("a warning")
    assert False

def test_ends_its_process():
    os._exit(7)

def test_of_the_same_process(): ...

@pytest.mark.skip
def test_skipped(): ...
"""
SLOW = """
import pytest, time

@pytest.mark.slow
def test_fails():
    assert False

@pytest.mark.slow
def test_waits():
    time.sleep(3600)
"""


def run_forked(folder: Path, tests: str, *options: str) -> str:
    """Run tests in two processes, and return what is said about them."""
    (folder / "test_all.py").write_text(tests)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    xdist_group\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "tests.forked", "--forks", "2", *options]
    command.append(f"--basetemp={folder}/temp")  # in the common folder others clean up, too, and pytest warns of that
    found = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1, found.stderr
    return found.stdout + found.stderr


def test_forks_report_what_one_process_would(tmp_path: Path) -> None:
    reported = run_forked(tmp_path, TESTS)
    for said in (
        "Captured stdout call -----------------------------\nbefore it failed",
        "UserWarning: a warning",
        "the test's process ended with code 7",
        "2 failed, 7 passed, 1 skipped, ",
    ):
        assert said in reported, reported  # the number of warnings is not compared: pytest may add its own


def test_the_first_failure_ends_all_processes_if_asked(tmp_path: Path) -> None:
    assert "stopping after 1 failures" in run_forked(tmp_path, SLOW, "-x")


def test_a_test_that_hangs_is_ended_and_shows_where(tmp_path: Path) -> None:
    reported = run_forked(tmp_path, SLOW, "--timeout", "1")
    assert "2 failed" in reported and "the test's process ended with code -6" in reported
    assert "in test_waits" in reported
