"""An etcd for demos and tests: `python -m rendezvous [--port PORT]` runs one until SIGTERM or Ctrl-C.

Never for production: one member, on a free port of this machine, its files in a temporary folder.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys

from rendezvous.errors import ServerError
from rendezvous.etcd.server import EtcdServer


def main() -> None:
    """Run an etcd until SIGTERM or Ctrl-C, and print its address."""
    parser = argparse.ArgumentParser(prog="python -m rendezvous", description=__doc__)
    parser.add_argument("--port", type=int, help="default: a free one")
    parser.add_argument("--data-dir", help="default: a temporary folder, deleted at the end")
    asked = parser.parse_args()
    if asked.port is not None and not 0 < asked.port < 65536:
        parser.error(f"--port must be 1 to 65535, not {asked.port}")
    # Python runs signal handlers between bytecodes, so a signal just before a wait would not end it. The wakeup socket
    # does, because the interpreter writes to it at once.
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        with EtcdServer(port=asked.port, data_dir=asked.data_dir) as server:
            sys.stdout.write(server.endpoint + "\n")
            sys.stdout.flush()
            woken.recv(1)
    except (ServerError, OSError) as error:  # the latter from --data-dir
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
