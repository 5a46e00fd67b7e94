"""The address, the interface and the name of this machine, as other nodes use them."""

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
"""Addresses that are on no network (RFC 5737, RFC 3849): the way to them is the way to any other machine."""

_SIOCGIFADDR = 0x8915


def own_address(given: str | None, options: EtcdOptions, max_nodes: int) -> str:
    """Return the address of this node: the given one, or that on the network that leads to etcd; no packet is sent.

    Raises OptionError if the given one is not an address of this machine.

    If etcd is on this machine, as on the first node of many jobs, or /etc/hosts gives the machine's name a loopback
    address, as Debian's installer writes it, the way to etcd leads nowhere: the other nodes are on the way out.
    """
    if given is not None:
        return _checked(given)
    for host, port in [*_etcds(options), *(ELSEWHERE if max_nodes > 1 else ())]:
        address = address_towards(host, port)
        if address is not None and not (max_nodes > 1 and is_loopback(address)):
            return address
    return _address_by_name() if max_nodes > 1 else "127.0.0.1"


def _etcds(options: EtcdOptions) -> list[tuple[str, int]]:
    """Return where etcd's first member is; nothing while a file that is to say so does not."""
    try:
        return [split_endpoint(options.addresses()[0])]
    except OptionError:
        return []


def address_towards(host: str, port: int) -> str | None:
    """Return the address by which this machine reaches another one; None if there is no way there."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((bare, port))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def is_loopback(address: str) -> bool:
    """Say whether an address means the machine that uses it, whichever that is."""
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
    """Return a name that two containers or machines do not share."""
    return f"{socket.gethostname()}-{boot_id()[:8]}"


def _checked(given: str) -> str:
    bare = given.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((bare, 0))
    except OSError as error:
        raise OptionError(
            f"--local-addr {given}: nothing can listen at this address ({error}): give one that this machine has and "
            "the other nodes reach, or leave it out for the one by which this node reaches etcd"
        ) from None
    return bare


def _address_by_name() -> str:
    """Return an address that the machine's name has and other machines can use, if it has any."""
    name = socket.getfqdn()
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    return next((address for address in found if not is_loopback(address)), "127.0.0.1")
