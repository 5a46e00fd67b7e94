"""`make demo`: real text, two nodes, one killed while the other goes on; then the same without, and one verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console

from chaos import cli
from chaos.judge.verdict import VERDICT
from elastic_train.system.wording import counted

DATA = Path("data/docstrings")
OUT = Path("runs/demo")

app = App(name="demo", help=__doc__)


@app.default
def demo(
    *, seed: int | None = None, network: str | None = None, json_: Annotated[bool, Parameter(name="--json")] = False
) -> int:
    """Import the docstrings of the installed libraries, train through a fault, and prove what came of it.

    --network cross_zone (or another one of `elastic-chaos run`) puts the second node behind such a link.
    """
    console = Console(markup=False, soft_wrap=True, highlight=False, quiet=json_)
    console.print("1. the corpus: the docstrings of the libraries installed here; no download")
    subprocess.run(
        [sys.executable, "-m", "elastic_train.cli.main", "data", "import", "docstrings", str(DATA)],
        check=True,
        stdout=subprocess.DEVNULL if json_ else None,
    )
    console.print("\n2. two nodes train a text classifier; one is killed in the middle, and comes back later")
    code = cli.run("demo", seed=seed, network=network, out=OUT, json_=json_)
    console.print("\n" + _price(json.loads((OUT / VERDICT).read_text())))
    console.print("\nto compare both runs in MLflow's UI, and in the terminal:")
    console.print("  .venv/bin/mlflow ui --backend-store-uri sqlite:///mlflow.db   # http://127.0.0.1:5000")
    console.print(f"  .venv/bin/elastic-train compare {OUT}/faulted {OUT}/reference")
    return code


def _price(verdict: Mapping[str, Any]) -> str:
    """Say what the killed node cost those that were left."""
    killed = [cost for cost in verdict["recoveries"] if verdict["faults"][cost["place"]]["kind"] == "kill_node"]
    if not killed:
        return "the histories do not say what the killed node cost"
    steps = killed[0]["rpo_steps"]
    lost = "no applied step" if steps == 0 else counted(steps, "applied step")
    return f"the killed node cost {killed[0]['rto_s']:.2f} s until the next step, and {lost}"


def main(arguments: list[str] | None = None) -> None:
    """Run the demo and leave with its exit code; errors are printed line by line, as by `elastic-chaos`."""
    try:
        cli.leave_with(lambda: app(arguments, result_action="return_value", exit_on_error=False))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the import has said what is wrong


if __name__ == "__main__":
    main()
