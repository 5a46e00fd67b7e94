"""The address, interface and name of this machine, as other nodes use them."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from rendezvous.agent.identity import split_endpoint
from rendezvous.errors import OptionError
from rendezvous.etcd.options import EtcdOptions
from rendezvous.process_table import boot_id

ELSEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses on no network (RFC 5737, RFC 3849): the route to them is the route to any other machine."""

_SIOCGIFADDR = 0x8915


def own_address(given: str | None, options: EtcdOptions, max_nodes: int) -> str:
    """Return this node's address: the given one, or that on the route to etcd; sends no packet.

    Raises OptionError if the given one is not an address of this machine. If etcd is on this machine, as on the first
    node of many jobs, or /etc/hosts maps the machine's name to a loopback address, as Debian's installer does, the
    route to etcd is local; then the default route's address is used.
    """
    if given:
        return _checked(given)
    for host, port in [*_etcds(options), *(ELSEWHERE if max_nodes > 1 else ())]:
        address = address_towards(host, port)
        if address is not None and not (max_nodes > 1 and is_loopback(address)):
            return address
    return _address_by_name() if max_nodes > 1 else "127.0.0.1"


def _etcds(options: EtcdOptions) -> list[tuple[str, int]]:
    """Return the address of etcd's first member; empty if an endpoint file does not name it yet."""
    try:
        return [split_endpoint(options.addresses()[0])]
    except OptionError:
        return []


def address_towards(host: str, port: int) -> str | None:
    """Return the address by which this machine reaches another one; None without a route."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((bare, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Return True if an address always means the machine that uses it."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def interface_of(address: str) -> str | None:
    """Return the name of the interface whose first IPv4 address this is; None if there is none."""
    try:
        wanted = socket.inet_aton(socket.gethostbyname(address))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if answer[20:24] == wanted:
                return name
    return None


def machine_name() -> str:
    """Return a name that is unique to this machine or container."""
    return f"{socket.gethostname()}-{boot_id()[:8]}"


def _checked(given: str) -> str:
    bare = given.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((bare, 0))
            bound = str(listener.getsockname()[0])
    except OSError as error:
        raise OptionError(
            f"--local-addr {given}: nothing can listen at this address ({error}): give one that this machine has and "
            "the other nodes reach, or leave it out for the one by which this node reaches etcd"
        ) from None
    if ipaddress.ip_address(bound).is_unspecified:
        raise OptionError(
            f"--local-addr {given} is every address of whichever machine uses it: give one by which the other nodes "
            "reach this one, or leave it out for the one by which this node reaches etcd"
        )
    return bare


def _address_by_name() -> str:
    """Return an address of the machine's name that other machines can use, else 127.0.0.1."""
    name = socket.getfqdn()
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    return next((address for address in found if not is_loopback(address)), "127.0.0.1")
