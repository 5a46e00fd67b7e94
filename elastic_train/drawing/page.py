"""Build a self-contained page from a template, the shared style sheet, and figures that may be missing.

No script, network or clock: the same facts give the same bytes. A figure with torn facts shows the reason in its place;
the rest of the page is unaffected. Template values are escaped, except figures.
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
    """Raised if a run lacks the data of a figure, e.g. has only one rank and none to compare with."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure, or the reason why there is none: a problem, or no data."""

    svg: Markup | None
    problem: str | None
    nothing: str | None = None


def draw(figure: Callable[[], Markup], *expected: type[Exception]) -> Drawn:
    """Draw a figure; a ValueError or one of `expected` becomes the reason why there is none."""
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
    """Fill a template, which may use `macros.html.j2`; the style sheet is `style`."""
    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["seconds"] = lambda value: "–" if value is None else f"{value:.2f}"
    style = Markup((_HERE / "style.css").read_text())
    return environment.get_template(template.name).render(style=style, **fields)
