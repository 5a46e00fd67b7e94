"""The release: the build is reproducible, and the wheel, installed as users do, imports and trains elsewhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from packaging.metadata import Metadata
from packaging.version import Version

from tests.conftest import ROOT

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("wheel")]  # the wheel is built once

PACKAGES = ("elastic_train", "rendezvous", "chaos")


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and the folder of a user who has nothing else."""

    release: Path
    wheel: Path
    bin: Path
    home: Path

    def run(self, program: str, *arguments: str) -> str:
        """Run one of the environment's programs; return its stdout."""
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.home,
            env=_environ(),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _environ() -> dict[str, str]:
    """Return an environment in which programs do not find the repository."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1"}


def _python(*arguments: str | Path) -> None:
    command: Sequence[str | Path] = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, env=_environ(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _copy_sources(folder: Path) -> Path:
    """Copy the release's sources that git tracks."""
    for name in (*PACKAGES, "configs", "deploy"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the source distribution and, from that alone, the wheel; install it with the existing dependencies.

    A line in a .pth file makes the dependencies visible. It does not run the .pth files of their folder, so the
    repository's editable install stays invisible.
    """
    folder = tmp_path_factory.mktemp("wheel")
    release = folder / "release"
    _python("build", "--no-isolation", "--outdir", release, _copy_sources(folder / "sources"))
    (wheel,) = release.glob("elastic_train-*.whl")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    binaries = folder / "venv" / "bin"
    _python("pip", "--quiet", "--python", binaries / "python", "install", "--no-deps", wheel)
    # Only after the install: otherwise pip would replace the repository's own installation.
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "home").mkdir()
    return Installed(release, wheel, binaries, folder / "home")


def test_the_same_sources_are_the_same_bytes(installed: Installed, tmp_path: Path) -> None:
    """Folder, times and permissions do not matter, nor whether the wheel is built from the source distribution."""
    sources = _copy_sources(tmp_path / "elsewhere")
    for file in sources.rglob("*"):
        if file.is_file() and not file.is_symlink():
            os.utime(file, (1e9, 1e9))
            file.chmod(0o600)
    _python("build", "--no-isolation", "--sdist", "--wheel", "--outdir", tmp_path / "again", sources)
    again = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert {file.name: file.read_bytes() for file in installed.release.iterdir()} == again
    assert sorted(Path(name).suffix for name in again) == [".gz", ".whl"]


def test_the_wheel_holds_every_file_of_the_packages(installed: Installed) -> None:
    """Scenarios, regressions, templates and scripts are not Python files, but are needed at run time."""
    folders = [ROOT / name for name in PACKAGES]
    # rglob does not follow the link to deploy/
    folders.append(ROOT / "elastic_train" / "cli" / "places" / "deploy")
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert {".py", ".yaml", ".j2", ".css", ".sbatch", ".typed"} <= {path.suffix or path.name for path in files}
    with zipfile.ZipFile(installed.wheel) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith(tuple(f"{name}/" for name in PACKAGES))}
        assert all(f"{name}/py.typed" in packed for name in PACKAGES)
        (metadata,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert packed == {str(path.relative_to(ROOT)) for path in files}
    described = Metadata.from_email(metadata, validate=True)
    assert described.version == Version("0.1.0") and described.license_expression == "Apache-2.0"
    assert described.description_content_type == "text/markdown" and described.keywords and described.classifiers


def test_the_installed_packages_are_those_of_the_wheel(installed: Installed) -> None:
    program = f"import {', '.join(PACKAGES)}; print(*({', '.join(f'{name}.__file__' for name in PACKAGES)}), sep='\\n')"
    files = installed.run("python", "-c", program).splitlines()
    assert len(files) == len(PACKAGES)
    assert all(Path(file).is_relative_to(installed.bin.parent) for file in files), files


def test_the_installed_command_makes_data_and_trains(installed: Installed) -> None:
    """The command runs from an empty folder with the built-in task and synthetic data."""
    assert "launch" in installed.run("elastic-train", "--help")
    installed.run("elastic-train", "data", "synth", "rows", "--rows", "200", "--rows-per-group", "50")
    described = {
        "run": {"dir": "run"},
        "task": {"params": {"max_tokens": 16, "dim": 16, "depth": 1, "heads": 2}},
        "data": {"train": "rows", "too_long": "truncate"},
        "batch": {"global_batch": 16, "micro_batch": 8},
        "max_steps": 3,
    }
    (installed.home / "config.yaml").write_text(yaml.safe_dump(described))
    installed.run("elastic-train", "train", "config.yaml")
    program = "import elastic_train as et; print(et.discover(et.open_store('run')).head.step)"
    assert installed.run("python", "-c", program) == "3\n"
    assert "proven" in installed.run("elastic-train", "audit", "run")


def test_the_installed_chaos_command_has_its_scenarios(installed: Installed) -> None:
    """It lists the shipped scenarios, and runs the installed trainer in virtual time."""
    shown = installed.run("elastic-chaos", "ls")
    shipped = [path.stem for path in (ROOT / "chaos" / "scenario" / "shipped").glob("*.yaml")]
    assert shipped and all(name in shown for name in shipped)
    assert '"digest"' in installed.run("elastic-chaos", "sim", "--seeds", "1", "--json")
