"""A release describes what users install: all of it, nothing else, under known licences."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.deploy.pages import command
from tests.release.__main__ import is_told

pytestmark = pytest.mark.deploy
UNDECLARED = {"| huey"}
"""Dependency of MLflow whose licence (MIT) is in its sources only."""


def test_what_the_changelog_does_not_tell_is_no_release() -> None:
    assert is_told("0.1.0", "# Changelog\n\n## Unreleased\n\n## 0.1.0\n\nThe first.\n")
    assert not is_told("0.1.1", "## Unreleased\n\n## 0.1.10\n\n## 0.1.0\n\nOf what came before 0.1.1.\n")


def test_a_release_is_complete(tmp_path: Path) -> None:
    """Both archives, a bill of materials without tools of development, a licence for each package, and sums."""
    pytest.importorskip("cyclonedx_py")
    pytest.importorskip("build")
    _, words = command("skypilot.md", "make release")
    subprocess.run([*words, f"DIST={tmp_path}"], cwd=ROOT, check=True)
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    names = {each["name"].lower().replace("_", "-") for each in bill["components"]}
    assert {"torch", "pyarrow", "mlflow", "etcd-sdk-python", "s3fs", "transformers", "greenlet"} <= names
    assert not {"pytest", "mypy", "ruff", "moto", "cyclonedx-bom"} & names
    rows = (tmp_path / "licenses.md").read_text().splitlines()[2:]
    assert len(rows) == len(bill["components"])
    assert {row.split(" | ")[0] for row in rows if "not declared" in row} <= UNDECLARED
    sums = dict(line.split("  ")[::-1] for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert len([name for name in sums if name.endswith((".whl", ".tar.gz"))]) == 2
    assert sums == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in sorted(path.name for path in tmp_path.iterdir() if path.name != "SHA256SUMS")
    }
