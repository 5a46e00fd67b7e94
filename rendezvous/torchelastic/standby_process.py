"""Imported only by a node's standby process, before anything else: it dies with its agent and ignores other signals.

A scheduler that signals a whole process tree to leave means the workers, and so does a terminal that is closed. If the
standby process left, the workers would die with it, because it is their parent.
"""

import signal

from rendezvous.orphans import die_with_parent

die_with_parent()
dispositions = {
    number: signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT)
}
"""The handlers, before they were replaced, of the signals that the standby process ignores; workers restore them."""
