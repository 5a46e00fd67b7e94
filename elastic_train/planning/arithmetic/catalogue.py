"""Devices, links and clusters: the values of `--on`, from the package's YAML or a user's file.

A cluster is `nodes` of `per_node` devices each. `inside` links the devices of a node, `between` links nodes. The rate
of a link with `is_shared` belongs to the node; that of any other link belongs to each device.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from elastic_train.config import yaml12
from elastic_train.config.yaml12 import NOT_YAML
from elastic_train.errors import ConfigError
from elastic_train.system.wording import did_you_mean, nearest

BETWEEN_NODES: Mapping[str, str] = {"A100": "IB-HDR", "H100": "IB-NDR", "H200": "IB-NDR", "B200": "IB-NDR"}
"""The usual link between nodes, by device; others have 100GbE."""
_FORM = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([\w.-]+?)(?:@([\w.-]+))?")
WRITE = "write DEVICE, 8xH100, or NODESxDEVICESxDEVICE@LINK such as 4x8xH100@IB-NDR, or a YAML file"


@dataclass(frozen=True, slots=True)
class Link:
    """A network link: seconds per message in addition to its bytes, and bytes/s in one direction."""

    name: str
    gb_per_s: float
    alpha_s: float
    share: float = 1.0
    is_shared: bool = False

    @property
    def bytes_per_s(self) -> float:
        return self.gb_per_s * 1e9 * self.share


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device: a GPU or a CPU core. `node` is the usual number per machine, `link` connects these.

    `bus_gb_per_s` is the rate to and from host memory, each way. `pace` is the measured factor by which a real model's
    kernels exceed their estimated time. `tflops_fp8` is 0 if it has no float8.
    """

    name: str
    tflops_bf16: float
    tflops_fp32: float
    memory_gb: float
    memory_gb_per_s: float
    matmul_share: float
    memory_share: float
    call_s: float
    reserved_gb: float
    link: str
    bus_gb_per_s: float = 25.0
    node: int = 1
    is_cpu: bool = False
    pace: float = 1.0
    tflops_fp8: float = 0.0

    def peak_flops(self, precision: str) -> float:
        """Return the peak FLOP/s at a configured precision; with fp16 and fp8, that in bf16."""
        return 1e12 * (self.tflops_fp32 if precision == "fp32" else self.tflops_bf16)

    @property
    def bytes_per_s(self) -> float:
        return self.memory_gb_per_s * 1e9 * self.memory_share

    @property
    def usable_bytes(self) -> float:
        return (self.memory_gb - self.reserved_gb) * 1e9


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of devices; `inside` connects devices of a node, `between` connects nodes."""

    device: Device
    inside: Link
    between: Link
    nodes: int = 1
    per_node: int = 1

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def of_size(self, num_devices: int) -> Cluster:
        """Return the same cluster with `num_devices` devices, in nodes of the same size or in one smaller node."""
        per_node = min(self.per_node, num_devices)
        assert num_devices % per_node == 0, f"{num_devices} devices are not whole nodes of {per_node}"
        return replace(self, per_node=per_node, nodes=num_devices // per_node)

    @property
    def between_bytes_per_s(self) -> float:
        """Bytes/s that each device can send to other nodes while all devices of its node send."""
        return self.between.bytes_per_s / (self.per_node if self.between.is_shared else 1)

    @property
    def name(self) -> str:
        at = f"@{self.between.name}" if self.nodes > 1 else ""
        return f"{self.nodes}x{self.per_node}x{self.device.name}{at}"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Known devices, links and clusters, by name."""

    devices: Mapping[str, Device] = field(default_factory=dict)
    links: Mapping[str, Link] = field(default_factory=dict)

    def device(self, name: str) -> Device:
        return self.devices[_known_name(name, self.devices, "device")]

    def link(self, name: str) -> Link:
        return self.links[_known_name(name, self.links, "link")]


@functools.cache
def shipped() -> Catalogue:
    """Return the catalogue that is shipped with the package."""
    text = (resources.files("elastic_train.planning.arithmetic") / "devices.yaml").read_text()
    tree = yaml12.parse(text)
    assert isinstance(tree, dict), "the package's own file is a mapping"
    return _catalogue(tree, "devices.yaml", Catalogue())


def device_named(name: str) -> Device | None:
    """Return the GPU with this CUDA name, e.g. "NVIDIA H100 80GB HBM3"; None if its peak is not known.

    Variants with a lower peak (PCIe, NVL) and slices (MIG) are not known; the A100's peak is the same over PCIe.
    """
    words = name.upper().replace("-", " ").split()
    found = next((device for device in shipped().devices.values() if device.name in words and not device.is_cpu), None)
    is_less = "MIG" in words or (bool({"PCIE", "NVL"} & set(words)) and (found is None or found.name != "A100"))
    return None if is_less else found


def parse_cluster(text: str) -> Cluster:
    """Return the cluster named by `--on`; raises ConfigError with the nearest name."""
    if text.endswith((".yaml", ".yml")):
        return _from_file(Path(text))
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"--on '{text}': {WRITE}")
    first, second, name, between = found.groups()
    known = shipped()
    device = known.device(name)
    nodes, per_node = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or per_node < 1:
        raise ConfigError(f"--on '{text}': at least one node of one device; {WRITE}")
    if second is None and per_node > device.node and not device.is_cpu:
        if per_node % device.node:
            raise ConfigError(
                f"--on '{text}': a node has {device.node} {device.name}, which do not divide {per_node}; "
                f"write NODESxDEVICESx{name}"
            )
        nodes, per_node = per_node // device.node, device.node
    return Cluster(device, known.link(device.link), known.link(between or _usual(device)), nodes, per_node)


def _usual(device: Device) -> str:
    return BETWEEN_NODES.get(device.name, "10GbE" if device.is_cpu else "100GbE")


def _from_file(path: Path) -> Cluster:
    """Read a cluster file: `cluster`, and optional devices and links that extend the package's."""
    try:
        tree = yaml12.parse(path.read_text())
    except (OSError, UnicodeError, *NOT_YAML) as error:
        raise ConfigError(f"--on {path}: cannot be read as YAML: {error}") from error
    known = {"cluster", "devices", "links"}
    if not isinstance(tree, dict) or not isinstance(tree.get("cluster"), dict):
        raise ConfigError(f"--on {path}: needs a section 'cluster' with device, nodes, per_node and between")
    if unknown := [name for name in tree if name not in known]:
        raise ConfigError(
            *(f"--on {path}: no section '{name}'{did_you_mean(nearest(name, known))}" for name in unknown)
        )
    catalogue, on = _catalogue(tree, str(path), shipped()), tree["cluster"]
    names = {"device", "nodes", "per_node", "inside", "between"}
    if unknown := [name for name in on if name not in names]:
        raise ConfigError(
            *(f"--on {path}: cluster has no '{name}'{did_you_mean(nearest(name, names))}" for name in unknown)
        )
    device = catalogue.device(str(on.get("device")))
    nodes, per_node = on.get("nodes", 1), on.get("per_node", device.node)
    if not all(type(number) is int and number >= 1 for number in (nodes, per_node)):
        raise ConfigError(f"--on {path}: cluster.nodes and cluster.per_node are whole numbers, at least 1")
    inside, between = on.get("inside", device.link), on.get("between", _usual(device))
    return Cluster(device, catalogue.link(str(inside)), catalogue.link(str(between)), nodes, per_node)


def _catalogue(tree: Mapping[str, Any], where: str, base: Catalogue) -> Catalogue:
    if wrong := [key for _, key in _KINDS if not isinstance(tree.get(key) or {}, dict)]:
        raise ConfigError(*(f"{where}: {key} is not a mapping of names" for key in wrong))
    named = [(kind, name, values) for kind, key in _KINDS for name, values in (tree.get(key) or {}).items()]
    if wrong := [problem for kind, name, values in named for problem in _problems(kind, name, values, where)]:
        raise ConfigError(*wrong)
    made = [kind(name=str(name), **values) for kind, name, values in named]
    devices = {one.name: one for one in made if isinstance(one, Device)}
    links = {one.name: one for one in made if isinstance(one, Link)}
    return Catalogue({**base.devices, **devices}, {**base.links, **links})


_KINDS: tuple[tuple[Any, str], ...] = ((Device, "devices"), (Link, "links"))


_SPEEDS = ("tflops_bf16", "tflops_fp32", "memory_gb_per_s", "bus_gb_per_s", "gb_per_s")
_DIVISORS = (*_SPEEDS, "matmul_share", "memory_share", "share")
"""Numbers that are divided by."""


def _problems(kind: Any, name: str, values: Any, where: str) -> list[str]:
    """Return the problems with a device's or a link's keys."""
    fields = [one for one in dataclasses.fields(kind) if one.name != "name"]
    known = [one.name for one in fields]
    if not isinstance(values, dict):
        return [f"{where}: {name} is not a mapping of {', '.join(known)}"]
    wrong = [f"{where}: {name} has no '{key}'{did_you_mean(nearest(key, known))}" for key in values if key not in known]
    needed = [one.name for one in fields if one.default is dataclasses.MISSING]
    wrong += [f"{where}: {name} lacks '{key}'" for key in needed if key not in values]
    numbers = {key: value for key, value in values.items() if key not in ("link", "is_cpu", "is_shared")}
    wrong += [
        f"{where}: {name}.{key} must be a number {'more than' if key in _DIVISORS else 'of at least'} 0, not {value!r}"
        for key, value in numbers.items()
        if key in known and not (type(value) in (int, float) and (value > 0 if key in _DIVISORS else value >= 0))
    ]
    if not isinstance(values.get("link", ""), str):
        wrong.append(f"{where}: {name}.link must be the name of a link, not {values['link']!r}")
    return wrong


def _known_name(name: str, known: Collection[str], what: str) -> str:
    """Return the known name that matches regardless of case; raises ConfigError with the nearest."""
    by_case = {each.lower(): each for each in known}
    if name.lower() in by_case:
        return by_case[name.lower()]
    meant = nearest(name.upper(), known, cutoff=0.4) or nearest(name, known, cutoff=0.4)
    there_are = f"; there are {', '.join(known)}"
    raise ConfigError(f"--on: no {what} '{name}'{did_you_mean(meant, there_are)}")
