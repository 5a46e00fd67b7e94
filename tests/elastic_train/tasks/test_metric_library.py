"""Modules that are imported later than by who names them, and then are themselves."""

from __future__ import annotations

import importlib
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT, environ_of

pytestmark = pytest.mark.xdist_group("torchmetrics")  # one process imports it

NAME = "a_library_for_metrics"
SOURCE = """
class Model:
    kind = "the real one"

def score(word):
    return f"scored {word}"
"""


def _later(name: str) -> AbstractContextManager[None]:
    from elastic_train.tasks import metric_library

    return metric_library._later(name)


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module that has imported two names of a library while that was to be imported later."""
    (tmp_path / f"{NAME}.py").write_text(SOURCE)
    (tmp_path / "a_user_of_it.py").write_text(f"import {NAME}\nfrom {NAME} import Model, score\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_user_of_it", raising=False)
    with _later(NAME):
        user = importlib.import_module("a_user_of_it")
    assert NAME not in sys.modules
    yield user
    sys.modules.pop(NAME, None)


def test_what_was_taken_is_the_real_thing_once_it_is_used(used: ModuleType) -> None:
    """The library is imported by the first use of a class, and not by having its name."""
    taken = used.Model
    assert NAME not in sys.modules
    assert taken.kind == "the real one"
    assert NAME in sys.modules


def test_a_function_that_was_taken_is_the_real_one_when_it_is_called(used: ModuleType) -> None:
    """And stands in an annotation before that, as what torchmetrics takes from its module of plots does."""
    assert typing.get_args(typing.Optional[used.score])[0] is used.score  # noqa: UP045 - what torchmetrics writes
    assert NAME not in sys.modules
    assert used.score("it") == "scored it"


@pytest.mark.heavy
def test_a_metric_can_be_plotted() -> None:
    """By matplotlib, which torchmetrics imports for that; only then is it imported here."""
    program = (
        "import sys, torch\nfrom elastic_train.tasks.metric_library import MulticlassAccuracy\n"
        "metric = MulticlassAccuracy(num_classes=3)\nmetric.update(torch.tensor([0, 1]), torch.tensor([0, 2]))\n"
        "before = 'matplotlib' in sys.modules\nfigure, _ = metric.plot()\nprint(before, type(figure).__module__)\n"
    )
    command = [sys.executable, "-c", program]
    environ = environ_of(MPLBACKEND="agg", PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "matplotlib.figure"]


def test_who_imports_the_library_afterwards_gets_it(used: ModuleType) -> None:
    library = importlib.import_module(NAME)
    assert library.score("it") == "scored it" and library.__file__ is not None


def test_a_library_that_is_loaded_is_left_as_it_is(used: ModuleType) -> None:
    library = importlib.import_module(NAME)
    with _later(NAME):
        assert sys.modules[NAME] is library
    assert sys.modules[NAME] is library


def test_a_failed_import_leaves_no_placeholder() -> None:
    with pytest.raises(ImportError), _later("no_such_library"):
        importlib.import_module("no_such_other_library")
    assert "no_such_library" not in sys.modules


def test_others_that_look_at_all_modules_find_nothing_odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchvision does, which torchmetrics imports where it is installed: each module is asked for its file."""
    (tmp_path / "one_that_looks.py").write_text("import inspect, sys\nfound = inspect.getframeinfo(sys._getframe())\n")
    monkeypatch.syspath_prepend(tmp_path)
    with _later(NAME):
        looked = importlib.import_module("one_that_looks")
    assert looked.found.filename == str(tmp_path / "one_that_looks.py")
