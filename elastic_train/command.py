"""The `elastic-train` command, as it is installed: what trains listens for requests to leave before all imports.

A scheduler may take a node back, or a person press Ctrl-C, while the command is still being imported.
"""

from __future__ import annotations

import contextlib
import os
import sys

from elastic_train.launch import departure
from elastic_train.launch.parent import train_in_a_child
from rendezvous.open_files import fill_standard_streams


def main() -> None:
    """Run a command and exit with its code."""
    with contextlib.suppress(FileNotFoundError):  # the working folder is deleted
        sys.path.append(os.getcwd())  # noqa: PTH109 - where a user's task is, as for `python -m`, but installed ones first
    trains = sys.argv[1:2] in (["launch"], ["train"], ["ray"])
    fill_standard_streams(outlive_readers=trains)
    if sys.argv[1:2] == ["train"] and "WORLD_SIZE" not in os.environ:
        train_in_a_child()
    elif trains:
        departure.listen()
    from elastic_train.cli.main import main as run

    try:
        run()
    finally:
        departure.hear_no_more()


if __name__ == "__main__":
    main()
