"""Tutorials on a language model, a classifier of a CSV, and images, run command by command from their pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUTORIALS: Mapping[str, tuple[str, str]] = {
    "lm": ("models.md", "From texts to a language model"),
    "csv": ("models.md", "From a CSV to a classifier"),
    "images": ("images.md", "1. Ten digits"),
}
"""Pages below docs and their sections, whose code blocks form one tutorial."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(cd |(PYTHONPATH=\. )?elastic-train )")


def commands_of(name: str) -> Iterator[str]:
    """Yield a tutorial's shell commands, and its Python code as one command; printed output is left out."""
    page, title = TUTORIALS[name]
    section = (ROOT / "docs" / page).read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    for language, block in _BLOCK.findall(section):
        if language == "python":
            yield f"python <<'END'\n{block}END"
        elif _COMMAND.match(block):
            yield from block.replace("\\\n", " ").splitlines()


def seconds_of(name: str, say: Callable[[str], None]) -> float:
    """Run a tutorial in an empty folder next to the shipped configurations; return its commands' total seconds."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    total = 0.0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "configs").symlink_to(ROOT / "configs")
        for command in commands_of(name):
            if command.startswith("cd "):
                folder /= command.removeprefix("cd ")
                continue
            started = time.perf_counter()
            subprocess.run(["bash", "-c", command], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL)
            took = time.perf_counter() - started
            total += took
            say(f"{name}: {took:.1f} s  {command.splitlines()[0]}")
    return total
