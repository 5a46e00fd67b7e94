"""Docstrings: read from source files without running them, in shares of a long tail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from elastic_train.data.corpora.docstrings import LIBRARIES, read_docstrings, read_file, section_style, versions
from elastic_train.errors import DataError

pytestmark = pytest.mark.slow

SOURCE = '''"""A module of twenty characters and more."""
raise RuntimeError("this must never run")

class Shape:
    """A shape that has an area and a name."""

    def area(self, scale, *, power=2, **others):
        """Return the area of the shape, scaled.

        Args:
            scale: a factor
        """

    def _hidden(self):
        """short"""

    async def _later(self, *rest):
        """Wait for the area; a private coroutine.

        :param rest: more
        """
        def inner():
            """A function that stands inside of a method."""

if True:
    def free():
        """Return nothing, from inside a statement."""
'''


def write_source(folder: Path, library: str, *modules: str, source: str = SOURCE) -> None:
    """Write modules of a library."""
    for module in modules:
        path = folder / library / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


def write_functions(folder: Path, library: str, num_functions: int) -> None:
    """Write a library of so many documented functions."""
    texts = [f'def f{i}():\n    """Function {i} of the library {library}."""\n' for i in range(num_functions)]
    write_source(folder, library, "functions.py", source="\n".join(texts))


def test_a_file_gives_its_docstrings(tmp_path: Path) -> None:
    """Every definition with at least 20 characters of text is a sample, in source order, with what is known of it."""
    write_source(tmp_path, "joblib", "deep/shapes.py")
    path = tmp_path / "joblib" / "deep" / "shapes.py"
    samples = read_file("joblib", path, path.relative_to(tmp_path))
    assert [(sample.text.split(".")[0], sample.categorical) for sample in samples] == [
        ("A module of twenty characters and more", ("module", "public", "deep", "plain")),
        ("A shape that has an area and a name", ("class", "public", "deep", "plain")),
        ("Return the area of the shape, scaled", ("method", "public", "deep", "google")),
        ("Wait for the area; a private coroutine", ("method", "private", "deep", "sphinx")),
        ("A function that stands inside of a method", ("function", "public", "deep", "plain")),
        ("Return nothing, from inside a statement", ("function", "public", "deep", "plain")),
    ]
    # (depth of nesting, arguments) of each; a class and a module have no arguments to count.
    assert [sample.numeric[3:5] for sample in samples] == [(0, None), (1, None), (2, 4), (2, 2), (3, 0), (1, 0)]
    assert Counter(sample.numeric[5] for sample in samples) == Counter({float(len(SOURCE)): 6})


@pytest.mark.parametrize(
    "source", ["def broken(:\n    '''a docstring of many words'''", "x = 1", "\0'''a docstring'''"]
)
def test_a_file_that_cannot_be_parsed_gives_none(tmp_path: Path, source: str) -> None:
    """Other people's source may be for another Python, or no Python at all."""
    write_source(tmp_path, "joblib", "a.py", source=source)
    assert read_file("joblib", tmp_path / "joblib" / "a.py", Path("joblib/a.py")) == []


def test_versions_come_from_metadata(tmp_path: Path) -> None:
    """Installed libraries are named with their version, '' where no metadata has one."""
    for name in ("sklearn", "scikit_learn-1.9.1.dist-info", "joblib", "unknown"):
        (tmp_path / name).mkdir()
    assert versions(tmp_path) == {"sklearn": "1.9.1", "joblib": ""}


def test_reading_takes_shares_of_a_long_tail(tmp_path: Path) -> None:
    """Of 100 samples a library gives its share and at least one; equal texts count once; tests are passed over."""
    for library, num_functions in (("torch", 60), ("sympy", 30), ("joblib", 5), ("networkx", 0)):
        write_functions(tmp_path, library, num_functions)
    write_source(tmp_path, "joblib", "copy/functions.py", source=(tmp_path / "joblib" / "functions.py").read_text())
    write_source(tmp_path, "torch", "tests/test_a.py", "_vendor/b.py")
    samples = read_docstrings(tmp_path, 100, seed=1)
    assert Counter(sample.label for sample in samples) == Counter(torch=41, sympy=20, joblib=1)
    assert max(Counter(sample.text for sample in samples).values()) == 1
    assert [sample.text for sample in read_docstrings(tmp_path, 100, seed=1)] == [sample.text for sample in samples]


def test_one_library_is_too_few(tmp_path: Path) -> None:
    """A classifier of one class is refused, and the libraries that count are named."""
    write_functions(tmp_path, "torch", 3)
    with pytest.raises(DataError, match=r"has 1 of the libraries torch, sympy, .*; at least 2 are needed"):
        read_docstrings(tmp_path, 10, seed=1)
    assert len(LIBRARIES) == 11


@pytest.mark.parametrize(
    ("text", "style"),
    [
        ("Text\n\nParameters\n----------\nx", "numpy"),
        ("Text\n:param x: y", "sphinx"),
        ("Text\n\nReturns:\n  x", "google"),
        ("Text\n\nExamples\n========\n", "sympy"),
        ("Text", "plain"),
    ],
)
def test_section_styles(text: str, style: str) -> None:
    """A docstring's convention is recognised by the form of its sections."""
    assert section_style(text) == style
