"""Administration of etcd: raise and clear alarms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyetcd

from rendezvous.etcd.connection import Connection
from rendezvous.etcd.options import etcd_options

NOSPACE, CORRUPT = 1, 2
"""Etcd's alarms: the database is full; the members hold different data."""
_ACTIVATE, _DEACTIVATE = 1, 2
_WITHIN_S = 10.0


def raise_alarm(endpoint: str, alarm: int) -> None:
    """Raise an alarm as an etcd member does: all members refuse writes until it is cleared."""
    request = pyetcd.etcdrpc.AlarmRequest(action=_ACTIVATE, memberID=1, alarm=alarm)
    with _connection(endpoint) as connection:
        connection.call(lambda client: client.maintenancestub.Alarm(request, timeout=2.0), give_up_after_s=_WITHIN_S)


def has_alarm(endpoint: str, alarm: int) -> bool:
    """Return True if etcd lists an alarm."""
    with _connection(endpoint) as connection:
        raised = connection.call(lambda client: list(client.list_alarms()), give_up_after_s=_WITHIN_S)
        return any(each.alarm_type == alarm for each in raised)


def clear_alarms(endpoint: str) -> None:
    """Clear all alarms, as `etcdctl alarm disarm` does."""
    with _connection(endpoint) as connection:
        raised = connection.call(lambda client: list(client.list_alarms()), give_up_after_s=_WITHIN_S)
        for each in raised:
            request = pyetcd.etcdrpc.AlarmRequest(action=_DEACTIVATE, memberID=each.member_id, alarm=each.alarm_type)
            connection.call(
                lambda client, request=request: client.maintenancestub.Alarm(request, timeout=2.0),  # type: ignore[misc]
                give_up_after_s=_WITHIN_S,
            )


@contextlib.contextmanager
def _connection(endpoint: str) -> Iterator[Connection]:
    connection = Connection(etcd_options(endpoint))
    try:
        yield connection
    finally:
        connection.close()
