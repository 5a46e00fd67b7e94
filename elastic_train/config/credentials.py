"""Passwords in a configuration: where one may be, and what is written in place of it.

Credentials come from the environment, or from files of the libraries that need them. MLflow's
address may contain them, since databases that MLflow writes into know no other way: what is written or shown of a
configuration leaves them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

from elastic_train.system.wording import LEFT_OUT

MAY_HAVE = (("tracking", "mlflow_uri"),)
"""The keys, by section, whose addresses may have a password."""


def without_password(text: str) -> str:
    """Return a URL without its user and password, and any other text unchanged."""
    try:
        parts = urlsplit(text)
        if "@" not in parts.netloc:
            return text
        return urlunsplit(parts._replace(netloc=f"{LEFT_OUT}@" + parts.netloc.rpartition("@")[2]))
    except ValueError:
        return text


def has_password(text: str) -> bool:
    """Return True if a text is a URL with a password in it; a user alone, as in URLs of hdfs, is no password."""
    try:
        return ":" in urlsplit(text).netloc.rpartition("@")[0]
    except ValueError:
        return False


def is_left_out(text: str) -> bool:
    """Return True if `without_password` has made a URL out of another."""
    return f"://{LEFT_OUT}@" in text


def misplaced(tree: object) -> Iterator[tuple[str, str]]:
    """Yield (key, URL) of every URL with a password in a configuration, but for keys that may have one."""
    may = {f"{section}.{key}" for section, key in MAY_HAVE}
    return ((key, text) for key, text in texts(tree) if key not in may and has_password(text))


def texts(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of every text in a tree; `key` is the tree's own."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping | Sequence):
        for name, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from texts(each, f"{key}.{name}" if key else f"{name}")
