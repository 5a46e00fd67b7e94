"""Write the unsupported combinations into docs/limits.md from the table that refuses them: `tests.release.limits`.

With --check nothing is written; the exit code is 1 if the page is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from elastic_train.config.combinations import FEATURES, RULES, SIZES, Feature, Trait

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
BEGIN, END = "<!-- from elastic_train/config/combinations.py -->\n", "<!-- to here -->\n"


def main(arguments: list[str]) -> None:
    """Write the page, or with --check compare it."""
    page = PAGE.read_text()
    if (current := with_lists(page)) == page:
        return
    if "--check" in arguments:
        sys.exit(f"{PAGE.name}: its lists are not those of the code: run python -m tests.release.limits")
    PAGE.write_text(current)


def with_lists(page: str) -> str:
    """Return the page with the lists inserted between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{lists()}{END}{after}"


def lists() -> str:
    """Return the table of features, and the lists of incompatible models, optimizers and machines."""
    pairs = [rule for rule in RULES if set(rule.others) <= set(FEATURES)]
    rows = [f"| {_quoted(rule.features)} | {_quoted(rule.others)} | {rule.why} |\n" for rule in pairs]
    table = "Refused before training, with the way out:\n\n| | not with | since |\n|---|---|---|\n" + "".join(rows)
    by_key = dict[str, list[Trait | Feature]]()
    for rule in RULES:
        for key in dict.fromkeys(feature.partition(":")[0] for feature in rule.features):
            by_key.setdefault(key, []).extend(one for one in rule.others if one not in (*FEATURES, *SIZES))
    listed = [f"* `{key}`: {'; '.join(traits)}.\n" for key, traits in by_key.items() if traits]
    return f"\n{table}\nBy model, optimizer and machine:\n\n{''.join(listed)}\n"


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    main(sys.argv[1:])
