"""Interpret etcd's errors: retry, log in again, wait for its operator, or give up.

etcd's codes alone are ambiguous: a full database and too many requests share one, and so do a wrong password and an
expired token. The texts are those of etcd 3.4 to 3.6.
"""

from __future__ import annotations

import re
from enum import Enum, auto

import grpc  # type: ignore[import-untyped]
from pyetcd import exceptions as failures

from rendezvous.errors import (
    StoreBlockedError,
    StoreDeniedError,
    StoreRefusedError,
    StoreUnavailableError,
)


class Meaning(Enum):
    """The reaction to a failed call."""

    AGAIN = auto()
    """There is no leader, or a member is down or busy: retry, with another member if necessary."""
    LOG_IN = auto()
    """The token has expired, or users have changed since: retry with a new one."""
    BLOCKED = auto()
    """An alarm keeps etcd from writing until its operator clears it."""
    DENIED = auto()
    """User, password or permissions are wrong, until corrected here or in etcd."""
    NEVER = auto()
    """The request itself cannot be carried out."""


_AGAIN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    # Errors without a code in etcd, above all "context deadline exceeded" while there is no leader.
    grpc.StatusCode.UNKNOWN,
}
_OLD_TOKEN = ("auth store is old", "auth store revision is old", "revision in header is old")
_DENIED = ("authentication failed", "user name is empty", "user name not found", "permission")
ALARMS = {
    "database space exceeded": (
        "NOSPACE: its database is full. Make room with `etcdctl compact REVISION` and `etcdctl defrag`, or raise "
        "--quota-backend-bytes; then clear the alarm with `etcdctl alarm disarm`"
    ),
    "corrupt cluster": (
        "CORRUPT: its members hold different data. Replace the member that `etcdctl endpoint hashkv --cluster` shows "
        "to differ, or restore a snapshot; then clear the alarm with `etcdctl alarm disarm`"
    ),
}
"""Parts of etcd's texts during an alarm, with the alarm's name and remedy."""


def meaning_of(error: BaseException) -> Meaning:
    """Return the reaction to a call's error."""
    code, text = code_of(error), details_of(error)
    if alarm_in(text) is not None:
        return Meaning.BLOCKED
    if code is grpc.StatusCode.UNAUTHENTICATED or any(part in text for part in _OLD_TOKEN):
        return Meaning.LOG_IN
    if code in _AGAIN or isinstance(error, failures.NoServerAvailableError | failures.WatchTimedOut):
        return Meaning.AGAIN
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in text:
        return Meaning.AGAIN
    if code is grpc.StatusCode.PERMISSION_DENIED or (code is not None and any(part in text for part in _DENIED)):
        return Meaning.DENIED
    return Meaning.NEVER


def needs_new_client(error: BaseException) -> bool:
    """Return True if the client must be replaced: pyetcd would ask the same member, with the same token."""
    return meaning_of(error) is Meaning.LOG_IN or code_of(error) is grpc.StatusCode.UNKNOWN


def says_without_users(error: BaseException) -> bool:
    """Return True if a login was refused because etcd has no users (any more), so none is needed."""
    return code_of(error) is grpc.StatusCode.FAILED_PRECONDITION and "not enabled" in details_of(error)


def explained(
    error: Exception, where: str, user: str | None, waited_s: float, last_words: str
) -> StoreUnavailableError | StoreRefusedError:
    """Return the error for the caller: etcd's message, where, and what to do; `last_words` is the last message.

    Once every endpoint has just failed, pyetcd only reports that none is left.
    """
    text = details_of(error)
    match meaning_of(error):
        case Meaning.AGAIN:
            return StoreUnavailableError(
                f"no etcd answers at {where} (tried for {waited_s:.0f} s; {last_words}). "
                "Start etcd there, or correct the endpoint (HOST:PORT of --rdzv_endpoint, --endpoint or --etcd) or its "
                "TLS options."
            )
        case Meaning.BLOCKED:
            return StoreBlockedError(f"etcd at {where} has raised the alarm {alarm_in(text)}.")
        case Meaning.LOG_IN | Meaning.DENIED:
            name = "a client without a user" if user is None else f"the user {user!r}"
            return StoreDeniedError(
                f"etcd at {where} refused {name}: {text}. Correct `user` and `password` of --rdzv_conf, or grant that "
                "user's role to read and write all keys below /elastic/."
            )
        case Meaning.NEVER:
            return StoreRefusedError(f"etcd at {where} refused: {text}")


def alarm_in(text: str) -> str | None:
    """Return the alarm, with its remedy, in a text of etcd's; None if there is none."""
    return next((alarm for said, alarm in ALARMS.items() if said in text), None)


def code_of(error: BaseException) -> grpc.StatusCode | None:
    """Return the gRPC status of an error; pyetcd raises its own classes from the original."""
    cause = _cause(error)
    return cause.code() if isinstance(cause, grpc.RpcError) and hasattr(cause, "code") else None


def details_of(error: BaseException) -> str:
    """Return the first line of etcd's or gRPC's message, without the address that gRPC tried last.

    A host may have several, which would make one outage many reasons.
    """
    cause = _cause(error)
    text = cause.details() if isinstance(cause, grpc.RpcError) and hasattr(cause, "details") else str(error)
    return _TRIED.sub("", (text or type(error).__name__).splitlines()[0])


_TRIED = re.compile(
    r"^failed to connect to all addresses; last error: \w+: (ipv[46]:\S+: )?(Failed to connect to remote host: )?"
)


def _cause(error: BaseException) -> BaseException | None:
    return error if isinstance(error, grpc.RpcError) else error.__context__
