"""Shell completion: `elastic-train --install-completion` writes what a shell then completes with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from elastic_train.cli.main import main

pytestmark = pytest.mark.slow
ASK = """
source "$1"
COMP_WORDS=(elastic-train "${@:2}"); COMP_CWORD=$(($# - 1))
_elastic_train
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_of_all_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also those that are imported on first use; only the home of whoever asks for it is changed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / "completion"
    with pytest.raises(SystemExit) as left:
        main(["--install-completion", "--shell", "bash", "--output", str(script)])
    assert left.value.code == 0 and str(script) in capsys.readouterr().out

    def completed(*words: str) -> list[str]:
        done = subprocess.run(["bash", "-c", ASK, "ask", script, *words], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("la") == ["launch"]
    assert set(completed("submit", "")) >= {"slurm", "k8s"}
    assert completed("launch", "--graceful") == [] and "--grace-s" in completed("launch", "--gr")
