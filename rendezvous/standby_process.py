"""Imported by a node's standby process alone, before all else: it dies with its agent, and with nothing less.

A scheduler that tells a whole process tree to leave means the workers: they would die with the standby process, which
is their parent.
"""

import signal

from rendezvous.orphans import die_with_parent

die_with_parent()
for _number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(_number, signal.SIG_IGN)
