"""One page that needs nothing but itself: a template, the shared style sheet, and figures that may be missing.

No script, no network, no clock: the same facts give the same bytes. A figure whose facts are torn says so in its place,
and the rest of the page stands. Everything that a template shows is escaped unless it is a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_HERE = Path(__file__).parent

Fact = tuple[str, str, str]
"""A name, a value, and a note on it."""


class NothingToDraw(ValueError):  # noqa: N818 - no error: the facts are whole, and there are none of this kind
    """A run has nothing that a figure shows, such as one rank that could be compared with others."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure, or why there is none: a problem, or that there is nothing to draw."""

    svg: Markup | None
    problem: str | None
    nothing: str | None = None


def draw(figure: Callable[[], Markup], *expected: type[Exception]) -> Drawn:
    """Draw a figure; its ValueError, or one of `expected`, says why it cannot be."""
    reasons: tuple[type[Exception], ...] = (ValueError, *expected)
    try:
        return Drawn(figure(), None)
    except NothingToDraw as nothing:
        return Drawn(None, None, str(nothing))
    except reasons as reason:
        return Drawn(None, str(reason))
    except (LookupError, TypeError, ArithmeticError, AttributeError) as error:
        return Drawn(None, f"the evidence lacks what it needs: {type(error).__name__}: {error}")


def fill(template: Path, fields: Mapping[str, object]) -> str:
    """Fill a template, which may use `macros.html.j2` and has the style sheet as `style`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["seconds"] = lambda value: "–" if value is None else f"{value:.2f}"
    style = Markup((_HERE / "style.css").read_text())
    return environment.get_template(template.name).render(style=style, **fields)
