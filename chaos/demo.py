"""`make demo`: real text, two nodes, one killed in the middle; then the same without, and one verdict on both."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

from chaos import cli

DATA = Path("data/docstrings")
OUT = Path("runs/demo")

app = App(name="demo", help=__doc__, result_action="return_value")


@app.default
def demo(*, seed: int | None = None, json_: Annotated[bool, Parameter(name="--json")] = False) -> int:
    """Import the docstrings of the installed libraries, train through a fault, and prove what came of it."""
    console = Console(soft_wrap=True, highlight=False, quiet=json_)
    console.print("1. the corpus: the docstrings of the libraries installed here; no download")
    subprocess.run(
        [sys.executable, "-m", "elastic_train.cli", "data", "import", "docstrings", str(DATA)],
        check=True,
        stdout=subprocess.DEVNULL if json_ else None,
    )
    console.print("\n2. two nodes train a text classifier; one is killed in the middle, and comes back later")
    code = cli.run("demo", seed=seed, out=OUT, json_=json_)
    console.print("\nto compare both runs in MLflow's UI, and in the terminal:")
    console.print("  .venv/bin/mlflow ui --backend-store-uri sqlite:///mlflow.db   # http://127.0.0.1:5000")
    console.print(f"  .venv/bin/elastic-train compare {OUT}/faulted {OUT}/reference")
    return code


if __name__ == "__main__":
    try:
        sys.exit(app())
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
