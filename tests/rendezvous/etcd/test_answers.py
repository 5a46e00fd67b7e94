"""The meaning of etcd's errors, by the code and text of each version."""

from __future__ import annotations

import grpc
import pytest

from rendezvous.errors import StoreDeniedError
from rendezvous.etcd import connection
from rendezvous.etcd.answers import Meaning, details_of, meaning_of, needs_new_client
from rendezvous.etcd.options import etcd_options

CODE = grpc.StatusCode


class AnswerError(grpc.RpcError):
    """An error as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text


@pytest.mark.parametrize(
    ("code", "text", "meaning"),
    [
        (CODE.UNAVAILABLE, "etcdserver: no leader", Meaning.AGAIN),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Meaning.AGAIN),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Meaning.BLOCKED),
        (CODE.DATA_LOSS, "etcdserver: corrupt cluster", Meaning.BLOCKED),
        (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token", Meaning.LOG_IN),
        (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Meaning.LOG_IN),
        (CODE.UNKNOWN, "auth: revision in header is old", Meaning.LOG_IN),
        (CODE.INVALID_ARGUMENT, "etcdserver: authentication failed, invalid user ID or password", Meaning.DENIED),
        (CODE.INVALID_ARGUMENT, "etcdserver: user name is empty", Meaning.DENIED),
        (CODE.PERMISSION_DENIED, "etcdserver: permission denied", Meaning.DENIED),
        (CODE.NOT_FOUND, "etcdserver: requested lease not found", Meaning.NEVER),
        (CODE.INVALID_ARGUMENT, "etcdserver: request is too large", Meaning.NEVER),
        (CODE.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted", Meaning.NEVER),
    ],
)
def test_what_an_error_means(code: grpc.StatusCode, text: str, meaning: Meaning) -> None:
    """Some errors share a code and have different meanings."""
    error = AnswerError(code, text)
    assert meaning_of(error) is meaning
    assert needs_new_client(error) == (meaning is Meaning.LOG_IN)


@pytest.mark.parametrize(
    ("tried", "why"),
    [
        ("UNKNOWN: ipv6:%5B::1%5D:2379: Failed to connect to remote host: Connection refused", "Connection refused"),
        ("UNKNOWN: ipv4:127.0.0.1:2379: Failed to connect to remote host: Connection refused", "Connection refused"),
        ("UNKNOWN: ipv4:10.0.0.1:2379: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED",) * 2,
    ],
)
def test_an_outage_is_one_reason_whichever_address_was_tried_last(tried: str, why: str) -> None:
    """A line for each try told of a host with two addresses."""
    details = details_of(AnswerError(CODE.UNAVAILABLE, f"failed to connect to all addresses; last error: {tried}"))
    assert details == why.rpartition("2379: ")[2]


def test_one_whom_etcd_denies_access_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node asked without a pause for a quarter of an hour, and then said that too few nodes came."""

    def refuse(*_: object) -> None:
        raise StoreDeniedError("etcd refused the user 'me'")

    monkeypatch.setattr(connection, "list_prefix", refuse)
    with pytest.raises(StoreDeniedError):
        connection.await_etcd(etcd_options("127.0.0.1:1"), "/nothing", 0.2)
