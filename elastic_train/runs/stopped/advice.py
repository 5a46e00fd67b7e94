"""Choose the remedy for a process's end by its exit code, the kind of its error, and the way it was killed."""

from __future__ import annotations

from typing import Literal

from elastic_train.errors import (
    AwayError,
    ConfigError,
    CorruptError,
    ElasticTrainError,
    FencedError,
    HungError,
    NoProgressError,
    PeerLostError,
    Preempted,
    ResultError,
    SavesFailedError,
    StateLostError,
    StorageError,
    TooFewNodesError,
    UnfitError,
    WeightsDifferError,
)
from elastic_train.runs.lines import Line, text, whole
from rendezvous.agent.worker_end import UNFINISHED_CODE

Do = Literal["nothing", "start", "leave out", "fix"]
CODES: dict[Do, int] = {
    "nothing": 0,
    "start": Preempted.exit_code,
    "leave out": UnfitError.exit_code,
    "fix": CorruptError.exit_code,
}
"""Exit code of `status --why` by remedy, for schedulers."""
RESUME = "start it again: it resumes from the newest commit"
ANEW = "start it again: nothing is committed, so it starts at step 0"
LESS_MEMORY = (
    "let it need less memory (batch.micro_batch, parallel.recompute, data.num_workers), or give it more; then start it "
    "again"
)
STORAGE = "make the folder or store that it names readable and writable (space, rights, credentials)"
_KILLED = "was killed"
_NO_MEMORY = ("killed for memory", "out of memory", "can't allocate memory", "not enough memory", "MemoryError")
_NO_ANSWER = ("ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "TimeoutError", "gaierror")
_LIMITS = {
    "Too many open files": "raise the limit of open files (ulimit -n, LimitNOFILE)",
    "can't start new thread": "raise the limit of threads and processes (ulimit -u, pids.max)",
    "Resource temporarily unavailable": "raise the limit of threads and processes (ulimit -u, pids.max)",
}
_BAD_DEVICE = ("uncorrectable ECC", "fallen off the bus", "CUDA-capable device", "hardware stack error", "NVLink error")
_LOST_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Texts with which torch's collectives end if a task calls them and another rank has ended."""
_BY_A_LIBRARY = ("SIGSEGV", "SIGILL", "SIGABRT", "SIGFPE")
_OF_STORAGE = {kind.__name__ for kind in (SavesFailedError, StorageError, OSError, PermissionError)}
_OF_ETCD = (StorageError.__name__, ElasticTrainError.__name__)
_OF_COLLECTIVES = ("RuntimeError", "DistBackendError", "DistNetworkError")
_FOLLOWING_CODES = (StateLostError.exit_code, TooFewNodesError.exit_code)
_FOLLOWING_KINDS = (PeerLostError.__name__, FencedError.__name__)


def only_follows(end: Line) -> bool:
    """Return True if a process ended because of another: a lost peer, lost state, missing nodes, a newer world."""
    kind, why = text(end, "kind"), text(end, "why") or ""
    has_lost_one = kind in _OF_COLLECTIVES and any(words in why for words in _LOST_CONNECTION)
    return whole(end, "exit_code") in _FOLLOWING_CODES or kind in _FOLLOWING_KINDS or has_lost_one


def advice(code: int | None, why: str, kind: str | None, host: str | None) -> tuple[Do, str]:
    """Return the remedy for a process's end; `kind` is the class of its error, None if its agent noted the end."""
    if any(sign in why for sign in _NO_MEMORY):
        return "fix", LESS_MEMORY
    if why.startswith(_KILLED):
        return _of_a_kill(why, host)
    match code:
        case ConfigError.exit_code:
            return "fix", "change what it names, then start it again"
        case CorruptError.exit_code:
            return "fix", "repair or replace what it names; another start would meet it again"
        case UnfitError.exit_code:
            return "leave out", f"leave {host} out, have it examined (elastic-train doctor), and start again without it"
        case NoProgressError.exit_code:
            return "fix", "do not start it again before what it names is changed: it would stop at the same step"
        case HungError.exit_code:
            return (
                "start",
                f"start it again; if it hangs again on {host}, leave that machine out (the log has all stacks)",
            )
        case TooFewNodesError.exit_code:
            return "start", "start it again once enough nodes are there"
        case ResultError.exit_code:
            return "start", "start it again where the result can be written: no step is trained twice"
        case 1:
            return _of_an_error(kind, why, host)
    if code == UNFINISHED_CODE:
        return "fix", "find what ends the process: code of the task or a library calls exit, quit or os._exit"
    return "start", RESUME


def _of_a_kill(why: str, host: str | None) -> tuple[Do, str]:
    if "SIGBUS" in why:
        return "fix", "give it more shared memory (/dev/shm), or make the cut file whole; then start it again"
    if any(name in why for name in _BY_A_LIBRARY):
        return "fix", f"look in the log for the library that crashed; if it is always on {host}, leave that machine out"
    return "start", RESUME


def _of_etcd(why: str) -> tuple[Do, str]:
    if "refused" in why and "grant" in why:
        return "fix", "correct etcd's user, password or permissions, then start it again"
    if "raised the alarm" in why:
        return "fix", "clear etcd's alarm (free its space, then etcdctl alarm disarm), then start it again"
    if any(sign in why for sign in ("certificate", "CERTIFICATE", "cannot be read", "SSL_ERROR")):
        return "fix", "correct etcd's certificates or the client's, then start it again"
    return "start", "start it again once etcd answers: it resumes from the newest commit"


def _of_an_error(kind: str | None, why: str, host: str | None) -> tuple[Do, str]:
    """Return the remedy for an error without its own exit code."""
    if kind is not None and (kind in _OF_ETCD or kind.startswith("Store")) and "etcd" in why:
        return _of_etcd(why)
    if (limit := next((remedy for words, remedy in _LIMITS.items() if words in why), None)) is not None:
        return "fix", f"{limit}, then start it again"
    if kind in _NO_ANSWER:
        return "start", "start it again once the host that it names answers (network, firewall, DNS)"
    if kind == AwayError.__name__:
        return "start", "start it again once the storage that it names is mounted, or answers"
    if kind in _OF_STORAGE or "[Errno" in why:
        return "fix", f"{STORAGE}, then start it again"
    if any(words in why for words in _BAD_DEVICE):
        return "leave out", f"leave {host} out, have its devices examined (elastic-train doctor), and start again"
    if kind in _FOLLOWING_KINDS:
        return "start", RESUME
    if kind == WeightsDifferError.__name__:
        return (
            "fix",
            "leave out the machine that it or the events name (elastic-train doctor examines it), then start again",
        )
    return "fix", "mend the code or the place that it names, then start it again"
