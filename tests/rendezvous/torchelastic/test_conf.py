"""The keys of --rdzv_conf: ours, and all that users of torch's own backends may pass."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from rendezvous import EtcdServer, OptionError
from rendezvous.etcd.options import ETCD_KEYS
from rendezvous.torchelastic import conf as conf_module
from rendezvous.torchelastic.conf import (
    COUNT,
    FLAG,
    KEYS,
    LAUNCHER_TIMEOUT_S,
    SECONDS,
    TEXT,
    WHOLE,
    Conf,
    Factor,
    Ignored,
)
from rendezvous.torchelastic.entry_point import create_handler
from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler

ENDPOINT = "127.0.0.1:1"
FILES = ("ca_cert", "cert", "key", "cacert", "ssl_cert", "ssl_cert_key")
COMPANIONS = {"cert": {"ca_cert", "key"}, "key": {"ca_cert", "cert"}, "user": {"password"}, "password": {"user"}}
"""Options that are only valid together."""
OTHER_FACTOR = {"keep_alive_interval": 3, "keep_alive_max_attempt": 5}
"""Torch's value for the other of the two keys."""


def params(endpoint: str = ENDPOINT, **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("etcd", endpoint, "id", 1, 1, **conf)


def read(**conf: Any) -> Conf:
    return Conf.read(params(**conf))


def problems_of(**conf: Any) -> tuple[str, ...]:
    with pytest.raises(OptionError) as caught:
        read(**conf)
    return caught.value.problems


@pytest.fixture(autouse=True)
def _fresh_warnings() -> Iterator[None]:
    """With respect to warnings, each test is a new process."""
    conf_module._warn_once.cache_clear()
    yield
    conf_module._warn_once.cache_clear()


def sample(key: str, folder: Path) -> str:
    """Return a valid value that differs from every default."""
    kind = KEYS[key].kind
    if key in FILES:
        (folder / key).touch()
        return str(folder / key)
    if kind in (SECONDS, COUNT, WHOLE):
        return "7"
    if kind is FLAG:
        return "no"
    return {"recovery": "live", "protocol": "http", "store_type": "file"}.get(key, "text")


@pytest.mark.parametrize("key", KEYS)
def test_every_key_does_what_the_table_says(key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A valid value sets exactly the key's option, or has no effect and is logged with the reason."""
    meaning = KEYS[key]
    conf = {key: sample(key, tmp_path)}
    option = "" if isinstance(meaning, Ignored) else meaning.option
    conf |= {other: sample(other, tmp_path) for other in COMPANIONS.get(option, ())}
    with caplog.at_level(logging.WARNING, logger="rendezvous"):
        result = read(**conf)
    if isinstance(meaning, Ignored):
        assert result == Conf(etcd=result.etcd) and not result.etcd.secrets()
        (warning,) = caplog.messages
        assert f"{key} ({meaning.why})" in warning
        return
    assert caplog.messages == []
    if option in ETCD_KEYS:
        assert getattr(result.etcd, option) == conf[key]
    elif option != "protocol":  # which only has to match the endpoint
        parsed = meaning.kind.parse(conf[key])
        expected = parsed * OTHER_FACTOR[key] if isinstance(meaning, Factor) else parsed
        assert getattr(result, option) == expected != getattr(Conf(), option)
        assert replace(result, **{option: getattr(Conf(), option)}) == Conf(etcd=result.etcd)


@pytest.mark.parametrize("value", ["soon", "nan", "-inf", "0.5x", ""])
def test_malformed_values_are_errors(value: str) -> None:
    """The message has the key, the value and the expected format, even for ignored keys."""
    for key in (key for key, meaning in KEYS.items() if meaning.kind is not TEXT):
        (problem,) = problems_of(**{key: value})
        assert problem == f"--rdzv_conf: {key}={value!r} is not {KEYS[key].kind.what}"


@pytest.mark.parametrize(("key", "value"), [("ttl", "-1"), ("join_timeout", "inf"), ("keep_alive_max_attempt", "0")])
def test_numbers_out_of_range_are_errors(key: str, value: str) -> None:
    """The error comes before etcd is asked for a lease of that duration."""
    (problem,) = problems_of(**{key: value})
    assert f"{key}={value!r}" in problem


def test_the_agent_hears_how_its_workers_end_whatever_its_own_parent_ignores() -> None:
    """Below a daemon that ignores SIGCHLD, a killed worker had ended with 0, and a forked one always with 255."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(OptionError):
            create_handler(params(wat="1"))
        assert subprocess.run(["false"], check=False).returncode == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_all_problems_are_reported_at_once() -> None:
    """Unknown keys get the nearest name, bad values are named, and nothing is connected."""
    conf = {"tll": "3", "join_timout": "3", "last_call_s": "soon", "recovery": "dead", "user": "me", "wat": None}
    with pytest.raises(OptionError) as caught:
        create_handler(params(**conf))
    text = str(caught.value)
    assert len(caught.value.problems) == 6
    assert "'tll'; did you mean 'ttl'?" in text and "'join_timout'; did you mean 'join_timeout'?" in text
    assert "last_call_s='soon'" in text and "password" in text and "unknown key 'wat'; known keys: " in text


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ({"timeout": "600", "join_timeout": "300"}, ["timeout=600", "join_timeout=300"]),
        ({"timeout": "900", "join_timeout": "300"}, ["timeout=900", "join_timeout=300"]),
        ({"last_call_s": "1", "last_call_timeout": "30"}, ["last_call_s=1", "last_call_timeout=30"]),
        ({"ttl": "3", "keep_alive_interval": "2"}, ["ttl=3", "keep_alive_interval=2 * keep_alive_max_attempt=3"]),
        ({"ttl": "3", "keep_alive_max_attempt": 1}, ["ttl=3", "keep_alive_interval=5 * keep_alive_max_attempt=1"]),
    ],
)
def test_two_names_of_an_option_that_disagree_are_an_error(conf: dict[str, Any], named: list[str]) -> None:
    """The one problem names both keys with their values."""
    (problem,) = problems_of(**conf)
    assert " and ".join(named) in problem


def test_two_names_for_a_file_that_disagree_are_an_error(tmp_path: Path) -> None:
    """Certificates have up to three names: ours and those of torch's two etcd backends."""
    ours, theirs = sample("ca_cert", tmp_path), sample("cacert", tmp_path)
    (problem,) = problems_of(ca_cert=ours, cacert=theirs)
    assert f"ca_cert={ours} and cacert={theirs}" in problem
    assert read(ca_cert=ours, cacert=ours).etcd.ca_cert == ours


def test_two_names_that_agree_are_not_a_conflict() -> None:
    """The values are compared, not their spelling."""
    conf = read(ttl="6", keep_alive_interval=2, keep_alive_max_attempt="3", last_call_s="1.0", last_call_timeout=1)
    assert (conf.ttl_s, conf.last_call_s) == (6.0, 1.0)


def test_the_launchers_timeout_yields_to_join_timeout(tmp_path: Path) -> None:
    """The launcher adds its own timeout, which is not a conflict; ours replaces it."""
    logs = DefaultLogsSpecs(str(tmp_path))
    launch = LaunchConfig(1, 1, 1, rdzv_configs={"join_timeout": "60"}, logs_specs=logs)
    assert launch.rdzv_configs["timeout"] == LAUNCHER_TIMEOUT_S
    assert read(**launch.rdzv_configs).timeout_s == 60.0
    assert read(timeout=LAUNCHER_TIMEOUT_S).timeout_s == 900.0


def test_a_key_without_a_value_is_not_given() -> None:
    """Programs that create RendezvousParameters themselves pass None for it, as torch's own do."""
    assert read(is_host=None, join_timeout=None, cacert=None) == read()


@pytest.mark.parametrize(
    ("endpoint", "conf", "problem"),
    [
        ("b", {"protocol": "https"}, "protocol=https needs ca_cert=FILE"),
        ("b", {"protocol": "http", "cacert": ""}, "protocol=http contradicts ca_cert"),
        ("a, https://b", {"protocol": "http", "cacert": ""}, "protocol=http contradicts the endpoint 'https://b'"),
        ("a,http://b", {"protocol": "HTTPS", "ca_cert": ""}, "protocol=https contradicts the endpoint 'http://b'"),
    ],
)
def test_a_protocol_that_cannot_be_kept_is_an_error(
    endpoint: str, conf: dict[str, str], problem: str, tmp_path: Path
) -> None:
    """A request for TLS never results in plain text, nor a request for plain text in TLS."""
    files = {key: sample(key, tmp_path) for key, value in conf.items() if not value}
    with pytest.raises(OptionError, match=re.escape(problem)):
        Conf.read(params(endpoint, **conf | files))


@pytest.mark.parametrize("names", [("cacert", "cert", "key"), ("ca_cert", "ssl_cert", "ssl_cert_key")])
@pytest.mark.parametrize("endpoint", ["b:2379", "https://b:2379"])
def test_torchs_names_for_tls_options_are_accepted(names: tuple[str, ...], endpoint: str, tmp_path: Path) -> None:
    """Each of torch's etcd backends has its own names for mutual TLS."""
    files = [sample(name, tmp_path) for name in names]
    etcd = Conf.read(params(endpoint, protocol="https", **dict(zip(names, files, strict=True)))).etcd
    assert etcd.endpoints == ("b:2379",)
    assert [etcd.ca_cert, etcd.cert, etcd.key] == files


def test_ignored_keys_are_logged_once_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Keys with the same reason share one line, and a second handler of the process logs nothing."""
    conf = {"is_host": True, "heartbeat_timeout": "5", "read_timeout": "60", "ttl": "3"}
    with caplog.at_level(logging.WARNING, logger="rendezvous"):
        assert read(**conf) == read(**conf)
    (line,) = caplog.messages
    assert "\n" not in line and "is_host (etcd" in line and "heartbeat_timeout, read_timeout (calls" in line
    assert "ttl" not in line


def test_a_job_without_a_name_is_told_that_it_shares_one(caplog: pytest.LogCaptureFixture) -> None:
    """torchrun calls each of them "none": those of one etcd met in one world, without a word."""
    with caplog.at_level(logging.WARNING, logger="rendezvous"):
        for run_id in ("job", "none"):
            Conf.read(RendezvousParameters("etcd", ENDPOINT, run_id, 1, 2))
    assert caplog.messages == ["no --rdzv_id is given: all jobs without one that meet in this etcd become one job"]


class _KeysRead(ast.NodeVisitor):
    """Collects the keys that a module of torch reads from a rendezvous' configuration, or documents."""

    GETTERS = frozenset({"get", "get_as_int", "get_as_bool"})

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.computed: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        source, _, getter = called.rpartition(".")
        if getter in self.GETTERS and _is_conf(source):
            self._add(node.args[0])
        if called == "_get_timeout":
            self._add(node.args[1], suffix="_timeout")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _is_conf(ast.unparse(node.value)):
            self._add(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if isinstance(node.ops[0], ast.In | ast.NotIn) and _is_conf(ast.unparse(node.comparators[0])):
            self._add(node.left)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):  # a docstring's table of parameters
            self.keys |= set(re.findall(r"^ *\| (\w+) +\| \w", node.value, re.M)) - {"Parameter"}

    def _add(self, node: ast.expr, suffix: str = "") -> None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.keys.add(node.value + suffix)
        else:
            self.computed.append(ast.unparse(node))


def _is_conf(source: str) -> bool:
    return source.removeprefix("self.").removeprefix("config.") in (
        "params", "params.config", "rdzv_params", "rdzv_parameters", "rdzv_parameters.config", "rdzv_configs",
    )  # fmt: skip


def test_every_key_that_the_installed_torch_reads_is_in_the_table() -> None:
    """A new torch with a new key fails here: define in `KEYS` what the key means for this backend."""
    room = Path(inspect.getfile(torch_rendezvous)).parent
    sources = [*room.glob("*.py"), *map(Path, (torch.distributed.run.__file__, inspect.getfile(LaunchConfig)))]
    reader = _KeysRead()
    for source in sources:
        reader.visit(ast.parse(source.read_text()))
    assert reader.computed == ["key + '_timeout'"], "read a key that is computed from others: see what it may be"
    found = {"rank", "is_host", "store_type", "join_timeout", "heartbeat", "cacert", "ssl_cert", "max_workers"}
    assert found <= reader.keys, "the way in which torch reads its configuration has changed: teach this test"
    assert reader.keys <= KEYS.keys(), f"torch has new keys: {sorted(reader.keys - KEYS.keys())}"


@pytest.mark.slow
def test_the_table_is_importable_before_torch() -> None:
    """Torch's registry loads the handler, and with it the table, while it is itself being imported."""
    source = "import sys; from rendezvous.torchelastic.conf import KEYS; assert KEYS and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", source], check=True)


@pytest.mark.slow
def test_a_rendezvous_forms_with_a_configuration_for_torchs_own_backends(etcd: EtcdServer, run_id: str) -> None:
    """Two nodes, one of them the "host", as torch's agent tests configure all of their backends."""
    conf = {
        "timeout": LAUNCHER_TIMEOUT_S, "join_timeout": "60", "last_call_timeout": "1", "close_timeout": "30",
        "read_timeout": "60", "keep_alive_interval": "1", "keep_alive_max_attempt": "4", "heartbeat_timeout": "5",
        "store_type": "tcp", "use_libuv": "1", "protocol": "http", "etcd_prefix": "/torchelastic/p2p",
    }  # fmt: skip
    handlers = [
        create_handler(RendezvousParameters("etcd", etcd.endpoint, run_id, 2, 2, is_host=is_host, **conf))
        for is_host in (True, False)
    ]
    with ThreadPoolExecutor(2) as pool:
        worlds = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
    assert sorted(world.rank for world in worlds) == [0, 1] and {world.world_size for world in worlds} == {2}
    worlds[0].store.set("key", "value")
    assert worlds[1].store.get("key") == b"value"
    for handler in handlers:
        assert isinstance(handler, EtcdRendezvousHandler) and handler.node.ttl_s == 4.0
        handler.shutdown()
