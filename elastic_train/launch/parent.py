"""The parent of a process that trains alone: it knows how that process ended, as an agent knows of its workers.

Nothing inside a process prevents it from exiting with 0: a library's `exit(0)` in C, or an exec. So the command forks
before its imports, and the child trains. The parent holds nothing, forwards requests to leave, exits as the child did,
and reports what the child could not: that it was killed, or has not finished.
"""

from __future__ import annotations

import os
import resource
import signal
from typing import NoReturn

from elastic_train.launch import departure
from elastic_train.system.preemption import ORDERS, WARNINGS, tell
from rendezvous.agent.worker_end import (
    FAILURE_CODE,
    PAGE,
    RECENT_S,
    UNFINISHED_CODE,
    RecentMemoryKills,
    await_notes,
    described,
    judged,
    named_on,
    new_page,
    note_end,
)
from rendezvous.orphans import die_with_parent, keep_exit_codes

_HEARD = {*ORDERS, *WARNINGS, signal.SIGCHLD}
_BY_KERNEL = 0x80
"""`si_code` of a signal from the terminal, which parent and child both get (SI_KERNEL of Linux)."""


def train_in_a_child() -> None:
    """Return in a child, where supported, whose parent exits as the child does."""
    page = new_page()
    if page is None:
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # until the child listens
    keep_exit_codes()
    parent, kills = os.getpid(), RecentMemoryKills()
    child = os.fork()
    if child:
        _end_as(child, _status_of(child, kills), page, kills.before)
    die_with_parent()
    if os.getppid() != parent:
        os._exit(FAILURE_CODE)
    os.environ[PAGE] = f"/proc/{parent}/fd/{page}"
    os.close(page)
    departure.listen()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _status_of(child: int, kills: RecentMemoryKills) -> int:
    """Forward requests to the child until it has ended; return its status."""
    while True:
        heard = signal.sigtimedwait(_HEARD, RECENT_S)
        if heard is None:
            kills.look()
        elif heard.si_signo != signal.SIGCHLD:
            if heard.si_code != _BY_KERNEL:
                os.kill(child, heard.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status


def _end_as(child: int, status: int, page: int, kills_before: int | None) -> NoReturn:
    code = judged(os.waitstatus_to_exitcode(status), page)
    how = described(code, kills_before)
    note_end(named_on(page), code, how)
    await_notes()
    if code == UNFINISHED_CODE:
        tell(
            f"error: the process that trained ({child}) {how}: code of the task, or a library, ended it or "
            "put another program in its place. The same command resumes from the newest commit"
        )
        os._exit(FAILURE_CODE)
    if code >= 0:
        os._exit(code)
    tell(f"error: the process that trained ({child}) {how}: the same command resumes from the newest commit")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump, if any, is the child's
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    os._exit(128 - code)
