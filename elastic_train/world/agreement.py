"""Agree on decisions, errors and configurations: all ranks of a world act on what one rank knows.

`agree`: rank 0 looks at the outside world and decides; every rank gets its answer, or raises its error.

`say_why` and `heard`: a rank that fails anywhere else leaves its error in the world's store and closes its connections;
its peers, which only see a closed connection, read it there. As the store may be in rank 0's process, that process
waits a moment until all others have looked. Only for worlds that end with their processes: in live recovery, the others
continue.

`check_alike`: ranks that train together have equal configurations in everything that determines the result. Paths to
data and commits, and where metrics are shown, are a node's own choice (`OWN`); nothing else is. Different learning
rates would make weights differ; different steps for validations or commits, or different units of exchange, would make
ranks wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from elastic_train import errors
from elastic_train.config.schema import Config
from elastic_train.config.section import Section
from elastic_train.errors import ConfigError, ElasticTrainError, HungError, PeerLostError, RowError
from elastic_train.job.plan import Plan
from elastic_train.job.units.compiled import CALLS, compiler_of
from elastic_train.parallel.attention.choice import FINGERPRINT as ATTENTION
from elastic_train.parallel.attention.choice import adopt, current, fingerprint
from elastic_train.parallel.attention.kernels import machine_of
from elastic_train.parallel.devices.switches import TUNED, described, tuned_kernels
from elastic_train.parallel.group import Group
from elastic_train.system.extras import import_named, version_of
from elastic_train.tasks.task_source import compared, source_of
from rendezvous.membership.records import Job
from rendezvous.waiting import LOOK_EVERY_S, GivenUp, begin

T = TypeVar("T")

WHY, NUM_READY = "why", "ready to end"
ANSWER_S, READY_S = 2.0, 5.0
"""Seconds to wait for the store's answer, and for all ranks to be ready to end: they may share processors."""

log = logging.getLogger(__name__)
OWN = frozenset(
    {
        *("run.dir", "run.name", "run.forensic", "run.health_check"),
        *("data.train", "data.mixture", "data.validation", "data.num_workers", "data.cache_dir"),
        *("checkpoint.url", "checkpoint.near_dir", "checkpoint.accept_loss"),
        *("checkpoint.keep_last", "checkpoint.keep_every"),  # keep_best decides when ranks commit
        *("device", "peer_timeout_s", "give_up_after", "hang_timeout_s"),
    }
)
"""Keys that each node may set on its own. All others must be equal on all nodes.

A new key may determine the order in which ranks exchange data, and ranks that disagree on it hang or abort.
"""
OWN_SECTIONS = ("tracking", "monitoring", "profile")
_VECTOR = ("sse", "ssse", "avx", "fma", "f16c", "amx", "neon", "asimd", "sve", "bf16", "vsx")
_MODULES, _PARAMETERS, _TENSORS = "the task's modules", "the parameters", "the model's tensors"
_LISTS = (_MODULES, _PARAMETERS, _TENSORS, CALLS)


def agree(group: Group, decide: Callable[[], T]) -> T:
    """Let rank 0 decide and tell the others; if it fails, every rank raises an error of the same class.

    `decide` must return a JSON value (a tuple arrives as a list).
    """
    if group.rank == 0:
        try:
            value = decide()
        except ElasticTrainError as error:
            group.broadcast_object({"error": _public_name(error), "message": str(error)}, 0)
            raise
        group.broadcast_object({"value": value}, 0)
        return value
    answer = group.broadcast_object(None, 0)
    assert isinstance(answer, dict), "rank 0 sends a value or an error"
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]  # type: ignore[no-any-return]


def _public_name(error: BaseException) -> str:
    """Return the name of the nearest class in errors.py; packages have subclasses of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def say_why(group: Group, error: BaseException) -> None:
    """Tell the peers why this rank ends their world, and abandon its group."""
    if group.store is None:
        return
    store, is_ours = group.store, isinstance(error, ElasticTrainError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    words = {"rank": group.rank, "kind": _public_name(error) if is_ours else "", "text": text}

    def say() -> None:
        store.set(WHY, json.dumps(words))
        store.add(NUM_READY, 1)

    _ask(say)
    with contextlib.suppress(HungError):
        group.abandon()
    _await_others(group, store)


def heard(group: Group, lost: PeerLostError) -> ElasticTrainError:
    """Return the error that a lost peer left behind, or else the one that this rank has."""
    if group.store is None:
        return lost
    store = group.store

    def listen() -> bytes | None:
        if not store.check([WHY]):
            return None
        store.add(NUM_READY, 1)
        return bytes(store.get(WHY))

    words = _ask(listen)
    if words is None:
        return lost
    with contextlib.suppress(HungError):
        group.abandon()  # others may wait for this rank alone
    _await_others(group, store)
    said = json.loads(words)
    if said["kind"] == RowError.__name__:  # this rank would find it, too, in a world without that one
        return RowError(said["text"])
    return PeerLostError(f"rank {said['rank']} of {group.size} has ended: {said['text']}")


def _await_others(group: Group, store: Store) -> None:
    """Keep rank 0's process until all ranks have looked, because it may host the store."""
    until = time.monotonic() + READY_S
    while group.rank == 0 and time.monotonic() < until:
        if (_ask(lambda: store.add(NUM_READY, 0)) or group.size) >= group.size:
            return
        time.sleep(LOOK_EVERY_S)


def _ask(question: Callable[[], T]) -> T | None:
    """Return the store's answer; None if its process has ended, or it does not answer."""
    with contextlib.suppress(GivenUp, RuntimeError):
        return begin("why", question).result(ANSWER_S)
    return None


def check_alike(group: Group, plan: Plan, outline: Mapping[str, Sequence[str]], weights: Mapping[str, Tensor]) -> None:
    """Raise ConfigError, naming every differing key, on ranks with another configuration, data or model than rank 0.
    `outline` describes the parameters and the optimizer's groups, which follow from the task's code, as weights and
    buffers do; of these, names, shapes and types are compared, and the first difference is named. Rank 0 is the member
    that joined first: ranks that differ from it are rejected.
    """
    mine = deciding(plan) | {key: list(lines) for key, lines in outline.items()} | {_TENSORS: _shapes(weights)}
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
    seen = group.all_gather(torch.tensor(int.from_bytes(digest[:7], "big"))).flatten()
    if bool((seen == seen[0]).all()):
        return
    theirs = group.broadcast_object(mine, 0)
    assert isinstance(theirs, dict), "rank 0 sends what decides there"
    if seen[group.rank] != seen[0]:
        keys = sorted({*mine, *theirs})
        raise ConfigError(*(_problem(key, mine, theirs) for key in keys if mine.get(key, ...) != theirs.get(key, ...)))


def _problem(key: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describe a key's values here and on rank 0; for a list, the first difference."""
    here, there = mine.get(key, _default(key)), theirs.get(key, _default(key))
    if here and there and key in _LISTS:
        pairs = zip_longest(here, there, fillvalue="none")
        here, there = next((one, other) for one, other in pairs if one != other)
        key = f"the first of {key} that differs"
    return f"{key} is {here!r} here and {there!r} on rank 0: all nodes must have the same"


def _default(key: str) -> object:
    if key == "compile":
        return False  # the compared value is not the key's
    section: Any = Config
    *path, name = key.split(".")
    for part in path:
        section = section.model_fields[part].annotation if part in section.model_fields else Section
    field = section.model_fields.get(name)
    return None if field is None or field.is_required() else field.get_default(call_default_factory=True)


def _shapes(weights: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each tensor, in the order in which ranks would exchange them."""
    return [
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in weights.items()
    ]


def deciding(plan: Plan) -> dict[str, object]:
    """Return everything in configuration, data and code that determines the result: JSON values by key.

    Keys with their default are left out, so that a release with a new key can train with releases without it.
    """
    found: dict[str, object] = {
        "the training set's digest": plan.manifest.digest,
        "the validation set's digest": plan.feed.validation_digest,
        "the version of elastic-train": _series(_version("elastic-train")),
        _MODULES: compared(own_sources(plan)),
    }
    if (shares := plan.config.data.shares) is not None:
        found["the shares of data.mixture"] = list(shares)
    compiles = {"compile": True} if plan.config.compile is True else {}  # the value of auto; omitted if false
    return found | {key: value for key, value in _set_keys(plan.config) if key not in OWN | {"compile"}} | compiles


def own_sources(plan: Plan) -> list[str]:
    """Return names and digests of the task's modules, and of the user's optimizer and schedule."""
    return sorted({line for one in (type(plan.task), *_own_code(plan)) for line in source_of(one)})


def _set_keys(config: Config) -> Iterator[tuple[str, object]]:
    """Yield each key that differs from its default, with its value, except in a node's own sections."""
    for name, value in config.as_written.model_dump(mode="json", exclude_defaults=True).items():
        if not isinstance(getattr(config, name), Section):
            yield name, value
        elif name not in OWN_SECTIONS:
            yield from ((f"{name}.{key}", one) for key, one in value.items())


def _own_code(plan: Plan) -> list[Any]:
    """Return the user's own optimizer and schedule, if any."""
    optimizer = plan.config.optimizer
    paths = {"optimizer.name": optimizer.name, "optimizer.schedule": optimizer.schedule}
    return [import_named(key, path) for key, path in paths.items() if ":" in path]


def job_of(plan: Plan) -> Job:
    """Return the description of a job that later members under the same run id compare with theirs."""
    text = json.dumps(deciding(plan), sort_keys=True)
    return Job(plan.config.checkpoint_url, hashlib.sha256(text.encode()).hexdigest()[:16])


def _series(version: str) -> str:
    """Return the part of a version that must agree: 0.1 of 0.1.7, as releases of a series compute the same bits.

    So a live job can be upgraded node by node, from any release of a series to any other.
    """
    return ".".join(version.split(".")[:2])


def _version(package: str) -> str:
    return version_of(package) or "unknown"  # run from a source folder


def kernels_of(device: torch.device) -> dict[str, str]:
    """Return what bits may depend on besides configuration, data and code: device, processor and libraries."""
    is_cuda = device.type == "cuda"
    found: dict[str, str] = {
        "device": torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "pyarrow": _version("pyarrow"),
        **{name: _version(name) for name in ("transformers", "peft") if name in sys.modules},
    }
    if not is_cuda:
        return {**found, **_processor(), **described()}
    return {**found, **described(), **tuned_kernels()}


def differing_kernels(group: Group, device: torch.device, *, compiles: bool = False) -> list[str]:
    """Return, on every rank, one line per rank that differs from rank 0 in a way that may change bits.

    `compiles` is True if ranks compile kernels themselves.
    """
    mine = kernels_of(device) | (compiler_of(device) if compiles else {})
    if device.type == "cuda":
        mine[ATTENTION] = fingerprint(compiles=compiles)
    digest = zlib.crc32(json.dumps(mine, sort_keys=True).encode())
    seen = group.all_gather(torch.tensor(digest)).flatten().tolist()
    others = [rank for rank in range(group.size) if seen[rank] != seen[0]]
    if not others:
        return []
    first = group.broadcast_object(mine, 0)
    assert isinstance(first, dict), "rank 0 sends what it computes with"
    mine = _with_its_attention(mine, first, device, compiles=compiles)
    lines = []
    for rank in others:
        theirs = group.broadcast_object(mine, rank)
        assert isinstance(theirs, dict), "every rank sends what it computes with"
        if parts := [f"{key} {theirs.get(key)}, not {first.get(key)}" for key in _in_which_differ(theirs, first)]:
            lines.append(f"rank {rank} has {'; '.join(parts)}")
    return lines


def _in_which_differ(theirs: Mapping[str, str], first: Mapping[str, str]) -> list[str]:
    """Return the keys in which two ranks differ, ignoring kernels that only one of them has tuned so far."""
    keys = [key for key in {**first, **theirs} if theirs.get(key) != first.get(key)]
    return [key for key in keys if not key.startswith(TUNED) or (key in theirs and key in first)]


def _with_its_attention(
    mine: Mapping[str, str], first: Mapping[str, str], device: torch.device, *, compiles: bool
) -> dict[str, str]:
    """Adopt rank 0's attention kernels, and return this rank's kernels; raise ConfigError if it cannot.

    Ranks that differ in more than attention are left unchanged: they differ anyway.
    """
    if _in_which_differ(mine, first) != [ATTENTION]:
        return dict(mine)
    here, there = mine[ATTENTION], first[ATTENTION]
    if adopt(there, machine_of(device, compiles=compiles)):
        log.warning("attention is computed by %s here, as on rank 0, and not by %s", there, here)
        return {**mine, ATTENTION: there}
    choice = current()
    reasons = {} if choice is None else choice.refused
    reason = next((f" ({name}: {why})" for name, why in reasons.items() if there.startswith(name)), "")
    raise ConfigError(
        f"attention is computed by {here} on {socket.gethostname()} and by {there} on rank 0, which this node cannot "
        f"use{reason}: their bits differ. Install the same packages of kernels (flash-attn-3, flash-attn-4, "
        "nvidia-cudnn-frontend) on all nodes, or on none"
    )


def check_can_be_sharded(group: Group, plan: Plan, differing: Sequence[str]) -> None:
    """Raise ConfigError on ranks that may round differently from rank 0 if state is sharded: copies would differ.

    `differing` is the result of `differing_kernels`.
    """
    mine, parallel = [line for line in differing if line.startswith(f"rank {group.rank} ")], plan.config.parallel
    if not mine or not (parallel.has_shares or parallel.cell.size > 1):
        return
    off = {**dict.fromkeys(parallel.degrees, 1), "sequence": False, "shards": "none", "offload": "none"}
    key = next(key for key in off if getattr(parallel, key) != off[key])
    raise ConfigError(
        f"parallel.{key}: {getattr(parallel, key)} needs ranks that compute the same bits, since several update each "
        f"share of the state: {mine[0]}. Use equal machines, or set parallel.{key} to {off[key]}"
    )


@cache
def _processor() -> Mapping[str, str]:
    """Return the CPU's vendor and vector instructions, as far as /proc/cpuinfo has them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return {}
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", fields.get("Features", "")).split()
    vector = sorted(flag for flag in flags if flag.startswith(_VECTOR))
    return {
        "processor": fields.get("vendor_id", fields.get("CPU implementer", "")),
        "vector instructions": " ".join(vector),
    }
