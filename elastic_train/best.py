"""How a best commit is named: `min loss`, `max macro_f1`; the one rule for the configuration and for `ckpt`."""

from __future__ import annotations

import re

from elastic_train.errors import ConfigError


def parse_best(text: str) -> tuple[str, bool]:
    """Return the metric, and whether more of it is better; raise ConfigError if that is not said."""
    found = re.fullmatch(r"(min|max)\s+(\S+)", text.strip())
    if found is None:
        raise ConfigError(f"'{text}' names no best commit; write 'min loss', or 'max' and a metric's name")
    return found[2], found[1] == "max"
