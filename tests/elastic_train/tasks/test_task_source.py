"""Finding a task by its path, and the files that it consists of."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_train.config.schema import TaskConfig
from elastic_train.errors import ConfigError
from elastic_train.tasks import task_source
from elastic_train.tasks.task import load_task
from elastic_train.tasks.task_source import _imports, compared, source_files, source_of, task_imports
from elastic_train.tasks.text_classifier import TextClassifier
from elastic_train.tasks.witness import Witness
from tests.conftest import ROOT


def write(folder: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)


def kind_of(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str) -> type:
    monkeypatch.syspath_prepend(folder)
    found: type = importlib.import_module(module).Mine
    return found


def files_of(kind: type) -> set[str]:
    source_of.cache_clear()
    return set(source_files(kind))


def test_a_package_counts_with_all_that_it_imports_late_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a package with tools that the task does not use, only what it uses."""
    sources = {
        "pack1/__init__.py": "",
        "pack1/task.py": "from .parts import layers\n\nclass Mine:\n    def f(self):\n        from pack1 import late\n",
        "pack1/parts/__init__.py": "from pack1.parts.shared import *\n",
        "pack1/parts/layers.py": "import torch, json\nimport numpy as np\nimport beside1\n",
        "pack1/parts/shared.py": "",
        "pack1/late.py": "",
        "pack1/tool.py": "",
        "beside1.py": "",
        "elsewhere1.py": "",
    }
    write(tmp_path, sources)
    kind = kind_of(monkeypatch, tmp_path, "pack1.task")
    parts = {"pack1.parts", "pack1.parts.layers", "pack1.parts.shared"}
    assert files_of(kind) == {"pack1", "pack1.task", "pack1.late", "beside1"} | parts
    before = source_of(kind)
    write(tmp_path, {"pack1/tool.py": "1", "pack1/parts/shared.py": "WIDTH = 8\n"})
    source_of.cache_clear()
    changed = [line for line, old in zip(source_of(kind), before, strict=True) if line != old]
    assert [line.split()[0] for line in changed] == ["pack1.parts.shared"]


def test_a_single_file_counts_with_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path, {"train2.py": "from helper2 import (  # ours\n    x,\n)\nclass Mine: ...\n", "helper2.py": "x = 1\n"}
    )
    assert files_of(kind_of(monkeypatch, tmp_path, "train2")) == {"train2", "helper2"}


def test_of_installed_packages_only_the_task_s_own_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other installed packages are identified by their versions."""
    folder = tmp_path / "site-packages"
    write(folder, {"pack3/__init__.py": "import other3\nimport pack3.part\nclass Mine: ...\n", "pack3/part.py": ""})
    write(folder, {"other3.py": ""})
    assert files_of(kind_of(monkeypatch, folder, "pack3")) == {"pack3", "pack3.part"}


def test_of_this_package_only_the_tasks_count() -> None:
    """All else is known by its version; a user's class that derives from one of them brings it along."""
    assert {"elastic_train.tasks.text_classifier", "elastic_train.tasks.models.text_encoder"} <= set(
        files_of(TextClassifier)
    )
    assert all(name.startswith("elastic_train.tasks") for name in (*files_of(TextClassifier), *files_of(Witness)))
    derived = type("Mine", (TextClassifier,), {"__module__": "builtins"})
    assert source_of(derived) == source_of(TextClassifier) != source_of(Witness)
    assert source_of(type(None)) == ()


def test_an_installed_release_is_compared_by_its_series_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch release may have another message in a task; two checkouts of the source may differ in anything."""
    lines = [*source_of(TextClassifier), "mine abc"]
    assert compared(lines) == lines
    monkeypatch.setattr(task_source, "__file__", "/lib/site-packages/elastic_train/tasks/task_source.py")
    assert compared(lines) == ["mine abc"]


def test_no_more_than_so_many_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f"import many4_{number}\n" for number in range(20))
    write(tmp_path, {"many4.py": f"{lines}class Mine: ...\n", **{f"many4_{number}.py": "" for number in range(20)}})
    kind = kind_of(monkeypatch, tmp_path, "many4")
    monkeypatch.setattr(task_source, "MOST_FILES", 5)
    assert files_of(kind) == {"many4", "many4_0", "many4_1", "many4_2", "many4_3"}


@pytest.mark.slow
def test_imports_are_those_that_python_reads() -> None:
    """On every module of this repository's trainer, and on forms that it does not use."""
    for path in (ROOT / "elastic_train").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        assert set(parsed(name, path)) <= set(_imports(name, path)), path


@pytest.mark.parametrize(
    "source",
    [
        "import a, b.c as d  # and why",
        "import a; import b",
        "import a, \\\n    b",
        "from a import b as c, d",
        "from .. import a",
        "from .a.b import (\n    c,  # one\n    d as e,\n)",
        "from . import (a)",
        "from a import \\\n  b, \\\n  c",
        "if True:\n\tfrom ...x import y",
        "try:\n    import a\nexcept ImportError: import b",
        "from a import *",
    ],
)
def test_imports_of_any_form_are_seen(source: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(source + "\n")
    assert set(parsed("p.q.r.module", path)) <= set(_imports("p.q.r.module", path))


def parsed(name: str, path: Path) -> Iterator[str]:
    """Yield the absolute names that Python's own parser finds imported."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = [*above, *([node.module] if node.module else [])]
            yield from (".".join(base if alias.name == "*" else [*base, alias.name]) for alias in node.names)


@pytest.mark.parametrize(("path", "found"), [("uses4:Mine", True), ("plain4:Mine", False), ("space4.mine:Mine", True)])
def test_whether_a_task_imports_a_package_is_read_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, found: bool
) -> None:
    """Also from a file beside it, and inside functions; none of them is run."""
    sources = {
        "uses4.py": "raise SystemExit\nimport beside4\n",
        "beside4.py": "def load():\n    from transformers.models import auto\n",
        "plain4.py": "raise SystemExit\nimport transformers_of_mine\nimport elastic_train.tasks.causal_lm\n",
        "space4/mine.py": "import transformers as hf\n",
    }
    write(tmp_path, sources)
    monkeypatch.syspath_prepend(tmp_path)
    assert task_imports(path, "transformers") is found


def test_of_a_task_of_this_package_or_of_none_nothing_is_found() -> None:
    """The parameters of the package's own tasks say what they need."""
    assert not task_imports("elastic_train.tasks.sequence_classifier:SequenceClassifier", "transformers")
    assert not task_imports("no_such_module_4:Task", "transformers")


class Plain:
    """A task of the older kind, whose `collate` takes no random numbers."""

    def collate(self, rows: object, ids: object) -> dict[str, object]:
        return {}

    prepare = columns = build_model = loss = metrics = lambda self: None


class Drawing(Plain):
    def collate(self, rows: object, ids: object, draw: object) -> dict[str, object]:  # type: ignore[override]
        return {}


class Wrong(Plain):
    def collate(self, rows: object) -> dict[str, object]:  # type: ignore[override]
        return {}


@pytest.mark.parametrize("kind", [Plain, Drawing])
def test_tasks_with_and_without_random_numbers(kind: type) -> None:
    """Both kinds of `collate` make a task."""
    assert isinstance(load_task(TaskConfig(path=f"{__name__}:{kind.__name__}")), kind)


def test_a_module_without_the_task_is_named_by_its_file() -> None:
    """Another module of this name may come earlier on PYTHONPATH."""
    with pytest.raises(ConfigError, match=rf"has no attribute 'Mine'; it was imported from {re.escape(__file__)}\)"):
        load_task(TaskConfig(path=f"{__name__}:Mine"))
    with pytest.raises(ConfigError, match=r"cannot be imported \(No module named 'nowhere'\); write module:Class"):
        load_task(TaskConfig(path="nowhere:Mine"))


def test_a_collate_with_other_parameters_is_refused() -> None:
    """The message names the task, what its method takes, and what is expected."""
    message = r"task.path: '.*:Wrong': Wrong.collate\(rows.* cannot be called .*; expected collate\(rows, ids\)"
    with pytest.raises(ConfigError, match=message):
        load_task(TaskConfig(path=f"{__name__}:Wrong"))


class Old(Plain):
    """A task that says how it is cut as tasks once did."""

    tensor_plan = loss_of_part = lambda self: None


def test_methods_that_are_not_called_any_longer_are_refused_with_their_successors() -> None:
    with pytest.raises(ConfigError) as caught:
        load_task(TaskConfig(path=f"{__name__}:Old"))
    assert re.findall(r"has `(\w+)`, which is not called: write `(\w+)", str(caught.value)) == [
        ("tensor_plan", "placements"),
        ("loss_of_part", "run"),
    ]
