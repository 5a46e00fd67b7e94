"""The `elastic-train` command, as it is installed: a launcher listens for requests to leave before it imports anything.

A scheduler may take a node back in the seconds in which the command is still being imported.
"""

from __future__ import annotations

import sys

from elastic_train.launch import departure


def main() -> None:
    """Run a command and exit with its code."""
    if sys.argv[1:2] == ["launch"]:
        departure.listen()
    from elastic_train.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
