"""Compare this machine's clock with etcd's, which dates its HTTP answers to the second."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from elastic_train.health.result import Finding, ok, warn
from rendezvous.agent.identity import split_endpoint
from rendezvous.errors import OptionError
from rendezvous.etcd.options import EtcdOptions

ANSWER_S = 3.0
SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class Greeting:
    """A member's answer over HTTP: clock difference and, with TLS, the expiry of its certificate (unix seconds)."""

    ahead_s: float
    expires_at: float | None


def examine_clock(options: EtcdOptions) -> Iterator[Finding]:
    """Compare the clock with that of the first member that answers; no answer is not this machine's fault."""
    for endpoint in _addresses(options):
        answer = greeted(options, endpoint)
        if isinstance(answer, Greeting):
            yield judged(endpoint, answer)
            return
    yield ok("clock", f"not known: {options.where} do not tell the time")


def _addresses(options: EtcdOptions) -> tuple[str, ...]:
    """Return the members' addresses; empty while the file with them is not readable."""
    try:
        return options.addresses()
    except OptionError:
        return ()


def judged(endpoint: str, answer: Greeting | Exception) -> Finding:
    if isinstance(answer, Exception):
        return warn("clock", f"{endpoint} does not tell the time: {answer}", "check this machine's time service")
    direction = "ahead of" if answer.ahead_s > 0 else "behind"
    if abs(answer.ahead_s) > SKEW_S:
        found = f"{abs(answer.ahead_s):.0f} s {direction} etcd's"
        return warn("clock", found, "set it by NTP: TLS, object stores and logs depend on it, leases do not")
    return ok("clock", f"within {SKEW_S:.0f} s of etcd's")


def greeted(options: EtcdOptions, endpoint: str) -> Greeting | Exception:
    """Return a member's greeting, or the error."""
    try:
        return _greet(options, endpoint)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return error


def _greet(options: EtcdOptions, endpoint: str) -> Greeting:
    """Ask a member for its version, dated to the second."""
    host, port = split_endpoint(endpoint)
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=ANSWER_S)
    if options.ca_cert is not None:
        context = ssl.create_default_context(cafile=options.ca_cert)
        if options.cert is not None:
            context.load_cert_chain(options.cert, options.key)
        connection = http.client.HTTPSConnection(host.strip("[]"), port, timeout=ANSWER_S, context=context)
    with contextlib.closing(connection):
        connection.connect()
        certificate = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        asked_at = time.time()
        connection.request("GET", "/version")
        response = connection.getresponse()
        now = (asked_at + time.time()) / 2
        theirs = parsedate_to_datetime(response.headers["Date"] or "").timestamp() + 0.5
    until = certificate.get("notAfter") if certificate else None
    return Greeting(now - theirs, ssl.cert_time_to_seconds(until) if isinstance(until, str) else None)
