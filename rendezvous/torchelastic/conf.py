"""Parse --rdzv_conf before any connection is made, and report every problem at once.

`KEYS` is the table of all keys, ours and those of torch's own backends: each sets an option, is a factor of one, or is
accepted and ignored for a reason.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from rendezvous.errors import OptionError
from rendezvous.etcd.options import (
    ETCD_KEYS,
    EtcdOptions,
    etcd_options,
    unknown_keys,
    wrong_id,
)

if TYPE_CHECKING:  # torch's registry imports this module during its own import
    from torch.distributed.elastic.rendezvous import RendezvousParameters

BACKEND = "etcd"
LAUNCHER_TIMEOUT_S = 900
"""Value that torch's launcher passes as `timeout`, as a number instead of text, if --rdzv_conf has none."""
UNNAMED = "none"
"""torchrun's run id where none is given."""

_MALFORMED = (ArithmeticError, LookupError, TypeError, ValueError)
_log = logging.getLogger("rendezvous")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: its description, and a parser that raises one of `_MALFORMED` on anything else."""

    what: str
    parse: Callable[[Any], Any]


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(value)
    return seconds


def _count(value: Any) -> int:
    count = int(value)
    if count < 1:
        raise ValueError(value)
    return count


def _one_of(choices: Mapping[str, Any]) -> Kind:
    return Kind(f"one of {', '.join(choices)}", lambda value: choices[str(value).strip().lower()])


TEXT: Final = Kind("text", str)
SECONDS: Final = Kind("a number of seconds, 0 or more", _seconds)
COUNT: Final = Kind("a whole number, 1 or more", _count)
WHOLE: Final = Kind("a whole number", int)
FLAG: Final = _one_of(
    dict.fromkeys(("1", "true", "t", "yes", "y"), True) | dict.fromkeys(("0", "false", "f", "no", "n"), False)
)


@dataclass(frozen=True, slots=True)
class Sets:
    """The key's value is the value of an option."""

    option: str
    kind: Kind = SECONDS


@dataclass(frozen=True, slots=True)
class Factor:
    """The option is the product of all its factors; omitted ones have torch's default."""

    option: str
    kind: Kind
    default: float


@dataclass(frozen=True, slots=True)
class Ignored:
    """The key is checked, but has no effect."""

    why: str
    kind: Kind = SECONDS


_ONE_STORE = "every world has a TCPStore of its own, with torch's defaults"
_NNODES = "--nnodes says how many nodes a world has"
_OWN_DEADLINES = "calls to etcd and lease renewals have deadlines and retries of their own"

KEYS: Final[Mapping[str, Sets | Factor | Ignored]] = {
    # Ours. `timeout`, `cert` and `key` are also torch's names.
    "ttl": Sets("ttl_s"),
    "last_call_s": Sets("last_call_s"),
    "timeout": Sets("timeout_s"),
    "stop_grace_s": Sets("stop_grace_s"),
    "recovery": Sets("is_live", _one_of({"restart": False, "live": True})),
    "standby": Sets("has_standby", FLAG),
    "compact": Sets("compacts", FLAG),
    **{key: Sets(key, TEXT) for key in ETCD_KEYS},
    # torch's other names for these.
    "join_timeout": Sets("timeout_s"),
    "last_call_timeout": Sets("last_call_s"),
    "keep_alive_interval": Factor("ttl_s", SECONDS, default=5),
    "keep_alive_max_attempt": Factor("ttl_s", COUNT, default=3),
    "protocol": Sets("protocol", _one_of({"http": "http", "https": "https"})),
    "cacert": Sets("ca_cert", TEXT),
    "ssl_cert": Sets("cert", TEXT),
    "ssl_cert_key": Sets("key", TEXT),
    # Keys that torch's backends need and this one does not. `use_libuv` was read by earlier versions of torch.
    "is_host": Ignored("etcd holds the rendezvous, no node hosts it", FLAG),
    "store_type": Ignored(_ONE_STORE, _one_of({"tcp": "tcp", "file": "file"})),
    "use_libuv": Ignored(_ONE_STORE, FLAG),
    "read_timeout": Ignored(_OWN_DEADLINES),
    "heartbeat": Ignored(_OWN_DEADLINES),
    "heartbeat_timeout": Ignored(_OWN_DEADLINES),
    "close_timeout": Ignored("one write to etcd closes a job"),
    "etcd_prefix": Ignored("keys are below /elastic/<rdzv_id>/, so jobs that share an etcd need different ids", TEXT),
    "min_workers": Ignored(_NNODES, COUNT),
    "max_workers": Ignored(_NNODES, COUNT),
    "rank": Ignored("every world assigns its ranks itself", WHOLE),
}


@dataclass(slots=True)
class Conf:
    """The options of a rendezvous; times are in seconds."""

    ttl_s: float = 3.0
    last_call_s: float = 2.0
    timeout_s: float = float(LAUNCHER_TIMEOUT_S)
    stop_grace_s: float = 3.0
    is_live: bool = False
    has_standby: bool = True
    compacts: bool = True
    etcd: EtcdOptions = field(default_factory=lambda: EtcdOptions(("unset",)))

    @classmethod
    def read(cls, params: RendezvousParameters) -> Conf:
        """Check the endpoint and --rdzv_conf; raise OptionError with every problem, and log ignored keys."""
        given = _given(params.config)
        values, malformed = _parse(given)
        options, conflicts = _options(given, values)
        problems = wrong_id(params.run_id) + unknown_keys(params.config, KEYS) + malformed + conflicts
        problems += _plain_or_tls(options.pop("protocol", None), params.endpoint, "ca_cert" in options)
        try:
            etcd = etcd_options(params.endpoint, {name: options.pop(name) for name in ETCD_KEYS if name in options})
        except OptionError as error:
            problems += error.problems
        if problems:
            raise OptionError(*problems)
        _warn_of_ignored(values)
        if params.run_id == UNNAMED:
            _log.warning("no --rdzv_id is given: all jobs without one that meet in this etcd become one job")
        return cls(**options, etcd=etcd)


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's keys; the launcher adds its own `timeout` even to a configuration with `join_timeout`."""
    given = {key: value for key, value in config.items() if key in KEYS and value is not None}
    if "join_timeout" in given and given.get("timeout") == LAUNCHER_TIMEOUT_S:
        del given["timeout"]
    return given


def _parse(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parsed value of every valid key, and a problem for every other key."""
    values, problems = {}, []
    for key, text in given.items():
        kind = KEYS[key].kind
        try:
            values[key] = kind.parse(text)
        except _MALFORMED:
            problems.append(f"--rdzv_conf: {key}={text!r} is not {kind.what}")
    return values, problems


def _options(given: Mapping[str, Any], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the value of every option that a key sets, and a problem for each that two keys set differently."""
    said: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        meaning = KEYS[key]
        if isinstance(meaning, Sets):
            said[meaning.option][f"{key}={given[key]}"] = value
    for option, text, product in _products(values):
        said[option][text] = product
    problems = [
        f"--rdzv_conf: {' and '.join(texts)} say different things about the same option: give one of them"
        for texts in said.values()
        if len(set(texts.values())) > 1
    ]
    return {option: next(iter(texts.values())) for option, texts in said.items()}, problems


def _products(values: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield each option with a factor among the keys: its name, the product as text, and the product."""
    factors: dict[str, dict[str, float]] = defaultdict(dict)
    for key, meaning in KEYS.items():
        if isinstance(meaning, Factor):
            factors[meaning.option][key] = values.get(key, meaning.default)
    for option, numbers in factors.items():
        if numbers.keys() & values.keys():
            yield (
                option,
                " * ".join(f"{key}={number:g}" for key, number in numbers.items()),
                math.prod(numbers.values()),
            )


def _plain_or_tls(protocol: str | None, endpoint: str, has_ca_cert: bool) -> list[str]:
    """Return conflicts between torch's `protocol` and what chooses TLS here: the endpoint and `ca_cert`."""
    if protocol is None:
        return []
    problems = [
        f"--rdzv_conf: protocol={protocol} contradicts the endpoint {part!r}: correct one of them"
        for part in map(str.strip, endpoint.split(","))
        if "://" in part and not part.startswith(f"{protocol}://")
    ]
    if protocol == "https" and not has_ca_cert:
        problems.append("--rdzv_conf: protocol=https needs ca_cert=FILE, the authority that signed etcd's certificate")
    if protocol == "http" and has_ca_cert:
        problems.append("--rdzv_conf: protocol=http contradicts ca_cert (cacert), which means TLS: give one of them")
    return problems


def _warn_of_ignored(keys: Iterable[str]) -> None:
    reasons: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        meaning = KEYS[key]
        if isinstance(meaning, Ignored):
            reasons[meaning.why].append(key)
    if reasons:
        _warn_once("; ".join(f"{', '.join(keys)} ({why})" for why, keys in reasons.items()))


@functools.cache
def _warn_once(ignored: str) -> None:
    _log.warning("--rdzv_conf: these keys have no effect with the backend %r: %s", BACKEND, ignored)
