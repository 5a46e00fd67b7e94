"""Options to reach etcd: endpoints, TLS, user; parsed from torchrun's arguments, and passed on to the workers.

Bad input is refused before any connection is made: every problem at once, with the nearest valid name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rendezvous.errors import OptionError

DEFAULT_PORT = 2379
FILE = "@"
"""Prefix of an endpoint that is a file with etcd's current address, e.g. if a scheduler moves etcd."""

LEAST_VERSION = (3, 4)
LEAST = ".".join(map(str, LEAST_VERSION))
MOST_CHARS_OF_AN_ID = 200


def too_old(version: str) -> bool:
    """Return True if an etcd of this version lacks features that jobs need; unknown version formats pass."""
    found = re.match(r"v?([0-9]+)\.([0-9]+)", version)
    return found is not None and (int(found[1]), int(found[2])) < LEAST_VERSION


def wrong_id(run_id: str) -> list[str]:
    """Return the problems of a run id, which becomes part of etcd keys, paths, and variables."""
    is_printable = run_id.isprintable() and run_id == run_id.strip() and not any(char in "/\\" for char in run_id)
    if run_id.strip(".") and is_printable and len(run_id) <= MOST_CHARS_OF_AN_ID:
        return []
    shown = run_id if len(run_id) <= MOST_CHARS_OF_AN_ID else f"{run_id[:20]}… ({len(run_id)} characters)"
    wanted = (
        f"1 to {MOST_CHARS_OF_AN_ID} printable characters without slashes, no space at either end, and not dots alone"
    )
    return [f"the run id {shown!r} cannot be used (--id, --rdzv_id): give {wanted}"]


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Everything a process needs to reach its job's etcd."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each member, or @ and the path of a file with these."""
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None

    def __post_init__(self) -> None:
        problems = [] if self.endpoints else ["no etcd endpoint given: write HOST:PORT[,HOST:PORT]"]
        if len(self.endpoints) > 1 and any(part.startswith(FILE) for part in self.endpoints):
            problems.append(f"a file of endpoints ({FILE}PATH) is given alone, and not {', '.join(self.endpoints)}")
        for name in ("ca_cert", "cert", "key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                problems.append(f"{name}: no such file: {path}")
        if (self.cert is None) != (self.key is None):
            problems.append("cert and key belong together: give both, or neither")
        if self.cert is not None and self.ca_cert is None:
            problems.append("cert and key need ca_cert, the authority that signed etcd's certificate")
        if (self.user is None) != (self.password is None):
            problems.append("user and password belong together: give both, or neither")
        if problems:
            raise OptionError(*problems)

    def addresses(self) -> tuple[str, ...]:
        """Return HOST:PORT of each member, as given, or as currently in the endpoint file.

        Raises OptionError if the file cannot be read, or names none.
        """
        if not self.endpoints[0].startswith(FILE):
            return self.endpoints
        path = self.endpoints[0].removeprefix(FILE)
        try:
            named = Path(path).read_text().replace(",", " ").split()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}, which is to say where etcd is, cannot be read: {error}") from None
        if not named or any(part.startswith(FILE) for part in named):
            raise OptionError(f"{path} is to say where etcd is, as HOST:PORT[,HOST:PORT], and does not")
        return tuple(_endpoint(part) for part in named)

    @property
    def is_on_disk(self) -> bool:
        """True if the addresses or certificates come from files."""
        return self.endpoints[0].startswith(FILE) or self.ca_cert is not None

    @property
    def where(self) -> str:
        """The endpoints, for messages."""
        return ", ".join(self.endpoints)

    def secrets(self) -> dict[str, str]:
        """Return the options that `etcd_options` needs besides the endpoints."""
        return {name: value for name, value in asdict(self).items() if name != "endpoints" and value is not None}


ETCD_KEYS = ("ca_cert", "cert", "key", "user", "password")


def etcd_options(endpoint: str | Iterable[str], conf: Mapping[str, str] | None = None) -> EtcdOptions:
    """Parse `host:port[,host:port]`, or `@file`, and the etcd keys of a rendezvous configuration."""
    parts = [part.strip() for part in (endpoint.split(",") if isinstance(endpoint, str) else endpoint)]
    for part in parts:
        if part.startswith("https://") and "ca_cert" not in (conf or {}):
            raise OptionError(
                f"etcd's endpoint {part!r}: https needs ca_cert, the authority that signed etcd's certificate "
                "(--rdzv_conf=ca_cert=FILE); without it the connection would be in plain text, which is http://"
            )
    endpoints = tuple(_endpoint(part) for part in parts if part)
    return EtcdOptions(endpoints, **{name: str(conf[name]) for name in ETCD_KEYS if conf and name in conf})


def unknown_keys(conf: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return a message for each unknown key, with the probably intended name."""
    names = sorted(known)
    return [f"--rdzv_conf: unknown key {key!r}{_hint(key, names)}" for key in conf if key not in names]


def _hint(key: str, names: list[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(names)}"


def _endpoint(text: str) -> str:
    if text.startswith(FILE):
        return FILE + str(Path(text.removeprefix(FILE)).absolute())
    bare = text.removeprefix("http://").removeprefix("https://").rstrip("/")
    host, colon, port = bare.rpartition(":")
    if not colon or bare.endswith("]"):
        host, port = bare, str(DEFAULT_PORT)
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise OptionError(f"etcd's endpoint {text!r} is not HOST:PORT")
    if ":" in host and not host.startswith("["):
        raise OptionError(f"etcd's endpoint {text!r} is not HOST:PORT; write an IPv6 address in brackets: [::1]:{port}")
    return f"{host}:{port}"
