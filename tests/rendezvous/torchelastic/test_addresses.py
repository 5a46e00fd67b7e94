"""The address that a node publishes never means another machine to other nodes."""

from __future__ import annotations

import pytest

from rendezvous.errors import OptionError
from rendezvous.etcd.options import etcd_options
from rendezvous.torchelastic import addresses
from rendezvous.torchelastic.addresses import address_towards, interface_of, is_loopback, own_address

HERE = etcd_options("127.0.0.1:2379")


def test_an_etcd_on_this_machine_does_not_make_the_address_a_loopback_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Etcd is local on a job's first node; Debian's hosts file may map the machine's name to 127.0.1.1."""
    monkeypatch.setattr(
        addresses, "address_towards", lambda host, port: "127.0.1.1" if host == "127.0.0.1" else "10.0.0.7"
    )
    assert own_address(None, HERE, max_nodes=2) == "10.0.0.7"
    assert own_address(None, HERE, max_nodes=1) == "127.0.1.1", "a job of one node need not be reached"


def test_a_machine_without_a_way_out_has_the_address_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If that is a loopback address as well, all nodes are local, or none can be reached."""
    monkeypatch.setattr(addresses, "address_towards", lambda host, port: None)
    for named, expected in (("10.0.0.7", "10.0.0.7"), ("127.0.1.1", "127.0.0.1")):
        monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, at=named, **__: [(2, 1, 6, "", (at, 0))])
        assert own_address(None, HERE, max_nodes=2) == expected


def test_an_address_that_this_machine_does_not_have_is_refused() -> None:
    """The error names the option, before anything is started."""
    assert own_address("127.0.0.1", HERE, max_nodes=2) == "127.0.0.1"
    with pytest.raises(OptionError, match=r"--local-addr 198\.51\.100\.7: nothing can listen at this address"):
        own_address("198.51.100.7", HERE, max_nodes=2)


@pytest.mark.parametrize("given", ["0.0.0.0", "0"])
def test_an_address_of_every_machine_is_refused(given: str) -> None:
    """Others took it for their own: each node was out of reach of all others."""
    with pytest.raises(OptionError, match=r"--local-addr .* is every address of whichever machine uses it"):
        own_address(given, HERE, max_nodes=2)
    assert own_address("", HERE, max_nodes=1) == "127.0.0.1", "a variable without a value gives none"


def test_addresses_and_interfaces_of_this_machine() -> None:
    """The loopback interface always exists; an address of another machine belongs to no interface."""
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None and interface_of("no such name") is None
    assert is_loopback("127.0.1.1") and is_loopback("[::1]") and not is_loopback("10.0.0.1") and not is_loopback("a")
