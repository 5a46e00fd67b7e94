"""On top of an image's own torch: the wheel installs beside it, and takes nothing away."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.deploy
FOREIGN = "2.10.0a0+b558c986e8.nv25.11"
"""As NVIDIA's images of 2025.11 have it: before the release of its own number, and on no index."""


def resolved_beside(torch: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Let pip resolve this project, without an index, in an environment with that torch and our other requirements."""
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    info = packages / f"torch-{torch}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    (packages / "others.pth").write_text(f"{distribution('numpy').locate_file('')}\n")
    (folder / "kept").write_text(f"torch=={torch}\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    environ |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python"), "install", "--dry-run"]
    asked = ["--no-build-isolation", "--constraint", str(folder / "kept"), str(ROOT)]
    return subprocess.run([*pip, *asked], env=environ, capture_output=True, text=True, timeout=280, check=False)


def test_a_foreign_torch_stays(tmp_path: Path) -> None:
    """The one package that would be installed is ours; of an older torch than we run with, the conflict is named."""
    for name in ("newer", "older"):
        (tmp_path / name).mkdir()
    done = resolved_beside(FOREIGN, tmp_path / "newer")
    assert done.returncode == 0, done.stderr
    (would,) = [line for line in done.stdout.splitlines() if line.startswith("Would install")]
    assert would.split()[2:] == ["elastic-train-0.1.0"]
    refused = resolved_beside("2.8.0a0+34c6371d24.nv25.08", tmp_path / "older")
    assert refused.returncode != 0 and "torch" in refused.stderr + refused.stdout
