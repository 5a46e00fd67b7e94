"""The Python code in the documentation uses only existing names, and runs where it can be run."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastic_train as et
from elastic_train.config.parallel import ParallelConfig
from elastic_train.job.cells.cell_plan import cell_plan_of
from elastic_train.tasks.placements import Piece, run_piece
from tests.conftest import ROOT, run_source
from tests.elastic_train.training.whole_runs.stored import copy_stored_run

pytestmark = pytest.mark.slow

PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("**/[a-z]*.md")))]
OURS = ("elastic_train", "chaos", "rendezvous")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def the_snippet(page: str, text: str) -> str:
    """Return the page's one snippet that contains `text`."""
    (found,) = [code for code in snippets(page) if text in code]
    return found


def names_of_ours(code: str) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) for a snippet's imports from our packages and for `et.NAME`."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from ((alias.name, "__name__") for alias in node.names if alias.name.split(".")[0] in OURS)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "et":
            yield "elastic_train", node.attr


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_every_name_in_a_snippet_exists(page: str) -> None:
    for code in snippets(page):
        for module, name in names_of_ours(code):
            assert hasattr(importlib.import_module(module), name), f"{page}: {module}.{name}"
            assert module != "elastic_train" or name in [*et.__all__, "__name__"], f"{page}: {name} is not public"


def test_the_pages_with_snippets_are_found() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/data.md", "docs/checkpoints.md"} <= {p for p in PAGES if snippets(p)}


@pytest.fixture(scope="module")
def prices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of README and tutorial: 2,000 rows of area, rooms and price."""
    folder = tmp_path_factory.mktemp("home") / "data" / "prices"
    subprocess.run([sys.executable, "examples/own_task/make_data.py", str(folder)], cwd=ROOT, check=True)
    return folder


def test_the_task_of_the_readme_computes_a_loss() -> None:
    names: dict[str, object] = {"nn": nn, "to_tensors": lambda rows: rows}
    exec(the_snippet("README.md", "class Prices"), names)
    task = names["Prices"]()  # type: ignore[operator]
    batch = task.collate({"features": torch.ones(3, 2), "price": torch.zeros(3)}, None)
    model = task.build_model()
    loss = task.loss(model, batch)
    assert isinstance(loss, et.LaneLoss) and loss.weight == 3.0
    assert loss.total.item() == pytest.approx(3 * model(torch.ones(1, 2)).item() ** 2)


def test_the_task_of_the_tutorial_trains(tmp_path: Path, prices: Path) -> None:
    """Using the imports of the example it was taken from, it trains to the same bits as the example.

    Both are started as the API page shows.
    """
    example = ROOT / "examples" / "own_task"
    imports, _, _ = (example / "task.py").read_text().partition("COLUMNS = ")
    (tmp_path / "snippet").mkdir()
    (tmp_path / "snippet" / "task.py").write_text(imports + the_snippet("docs/tutorial.md", "class Prices"))
    digests = set()
    for folder in (example, tmp_path / "snippet"):
        run = tmp_path / folder.name / "run"
        overrides = {"RUN__DIR": str(run), "DATA__TRAIN": str(prices), "MAX_STEPS": "8"}
        program = the_snippet("docs/api.md", "et.train(").replace('"config.yaml"', repr(str(example / "config.yaml")))
        environ = {f"ELASTIC_TRAIN__{key}": value for key, value in overrides.items()}
        beside = f"import os, sys; os.environ.update({environ}); sys.path.insert(0, {str(folder)!r})\n"
        done = run_source(beside + program)
        assert done.returncode == 0, done.stderr
        digests.add(json.loads((run / "result.json").read_text())["weights_sha256"])
        said = done.stdout
        assert said.splitlines()[-1].startswith("done 8 ") and said.split()[-1] in digests
    assert len(digests) == 1


def test_the_loop_of_the_data_page_reads_its_lanes(prices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, all ranks read every sample of the first sixty steps once, and have the same cursor."""
    monkeypatch.chdir(prices.parent.parent)
    code = the_snippet("docs/data.md", "et.LaneLoader(").replace(
        "            ...\n", "            read.append(batch)\n"
    )
    seen, kept = Counter[int](), []
    for rank in range(3):
        read: list[et.LaneBatch] = []
        names = {"rank": rank, "world_size": 3, "cursor": et.Cursor(), "collate": lambda rows, ids: {}, "read": read}
        exec(code, names)
        assert [batch.lane for batch in read[:4]] == list(range(4 * rank, 4 * rank + 4))
        seen.update(int(id_) for batch in read for id_ in batch.ids)
        kept.append(names["kept"])
    assert set(seen.values()) == {1} and len(seen) == 60 * 12 * 2
    assert kept == [kept[0]] * 3 and kept[0].items() >= {"epoch": 0, "offset": 120}.items()


def test_the_checkpoint_page_reads_a_commit(tmp_path: Path) -> None:
    run = copy_stored_run(tmp_path) / "run"
    names: dict[str, object] = {}
    exec(the_snippet("docs/checkpoints.md", "et.read_state(").replace("s3://bucket/run", str(run)), names)
    assert isinstance(names["head"], et.CommitRecord) and names["head"].step == 14
    assert set(names["state"]) >= {"model", "optimizer"}  # type: ignore[call-overload]


def test_the_task_of_the_guide_is_cut_and_runs_in_stages() -> None:
    names: dict[str, Any] = {}
    exec(the_snippet("docs/guides/parallelism.md", "class Mine"), names)
    kind, layers = names["Mine"], (nn.Sequential(OrderedDict(up=nn.Linear(4, 8), down=nn.Linear(8, 4))) for _ in "0123")
    kind.loss_from = lambda self, x, batch: et.LaneLoss(x.square().sum(), float(len(x)))
    task, model, batch, given = kind(), nn.Sequential(*layers), {"x": torch.ones(3, 4)}, None
    plan = cell_plan_of(task, model, ParallelConfig(tensor=2, pipeline=2))
    assert plan is not None and plan.tensor["3.down"] == "row" and plan.dims["0.up.weight"] == 0
    for number, modules in enumerate(plan.pieces):
        given = run_piece(task, model, batch, Piece(modules, given, is_last=number == 1))
    assert isinstance(given, et.LaneLoss) and given.total.equal(task.loss(model, batch).total)
