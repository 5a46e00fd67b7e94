"""On top of an image's own torch: the wheel installs beside it, and takes nothing away."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import venv
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.deploy.pages import command, commands

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
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    environ |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = f"{sys.executable} -m pip --python {folder / 'venv' / 'bin' / 'python'}"
    keeps, installs = (
        line.replace("python3 -m pip", pip) for line in commands("containers.md") if line.startswith("python3 -m pip")
    )
    subprocess.run(keeps, shell=True, cwd=folder, env=environ, check=True)
    (named,) = re.findall(r"'\./elastic_train-[^']+\.whl\[[a-z0-9,]+\]'", installs)  # here: from the sources
    asked = f"{installs.replace(named, str(ROOT))} --dry-run --no-build-isolation"
    return subprocess.run(
        asked, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize("begins", ['make image IMAGE="--build-arg TORCH', 'make image IMAGE="--build-arg BASE'])
def test_what_the_page_gives_make_reaches_the_build(begins: str) -> None:
    _, words = command("containers.md", begins)
    given = words[-1].removeprefix("IMAGE=")
    done = subprocess.run([words[0], "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"build $format -f deploy/Containerfile {given} -t elastic-train:" in done.stdout
    name = given.removeprefix("--build-arg ").partition("=")[0]
    assert f"\nARG {name}" in f"\n{(ROOT / 'deploy' / 'Containerfile').read_text()}"


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


def test_the_health_check_asks_wherever_the_page_is() -> None:
    """At a port of this machine, or at an address and a port, as everybody's page has them."""
    (check,) = re.findall(r"HEALTHCHECK.* CMD (\[(?:.|\\\n)*?\])\n", (ROOT / "deploy" / "Containerfile").read_text())
    command = json.loads(check.replace("\\\n", ""))

    def is_healthy(at: str) -> bool:
        environ = {**os.environ, "ELASTIC_TRAIN__MONITORING__PORT": at}
        return subprocess.run(command, env=environ, capture_output=True).returncode == 0

    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as page:
        threading.Thread(target=page.serve_forever).start()
        healthy = {at: is_healthy(f"{at}{page.server_port}") for at in ("", "0.0.0.0:", "127.0.0.1:")}
        page.shutdown()
    assert healthy == {"": True, "0.0.0.0:": True, "127.0.0.1:": True}
    assert not is_healthy(str(page.server_port))
