"""Imported by a node's standby process alone, before all else: it dies with its agent, and with nothing less.

A scheduler that tells a whole process tree to leave means the workers: they would die with the standby process, which
is their parent. So does a terminal that is closed.
"""

import signal

from rendezvous.orphans import die_with_parent

die_with_parent()
dispositions = {
    number: signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
}
"""What a program that is started by the agent finds for the signals that the standby process ignores."""
