"""Devices and links by name: what is wrong is said, with the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.errors import ConfigError
from elastic_train.planning.arithmetic.catalogue import parse_cluster, shipped


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device", "between"),
    [
        ("CPU", 1, 1, "CPU", "10GbE"),
        ("8xh100", 1, 8, "H100", "IB-NDR"),
        ("64xA100", 8, 8, "A100", "IB-HDR"),
        ("4x8xH200@roce-400", 4, 8, "H200", "RoCE-400"),
        ("2x4xL4@25GbE", 2, 4, "L4", "25GbE"),
    ],
)
def test_a_cluster_is_named_by_its_nodes_devices_and_link(
    text: str, nodes: int, per_node: int, device: str, between: str
) -> None:
    found = parse_cluster(text)
    assert (found.nodes, found.per_node, found.device.name, found.between.name) == (nodes, per_node, device, between)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xH10", "did you mean 'H100'"),
        ("2x8xH100@IB-NDX", "did you mean 'IB-NDR'"),
        ("Gaudi3", "there are A100"),
        ("12xH100", "do not divide 12"),
        ("0xH100", "at least one node"),
        ("8 x H100", "write DEVICE"),
    ],
)
def test_what_cannot_be_named_so_is_said(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_cluster(text)


def test_a_shared_link_is_cut_among_the_devices_of_a_node() -> None:
    shared, own = parse_cluster("2x8xL4@100GbE"), parse_cluster("2x8xH100@IB-NDR")
    assert shared.between_bytes_per_s == shared.between.bytes_per_s / 8
    assert own.between_bytes_per_s == own.between.bytes_per_s


def test_every_device_has_a_link_and_sane_numbers() -> None:
    known = shipped()
    assert set(known.devices) == {"A100", "H100", "H200", "B200", "L4", "CPU"}
    for device in known.devices.values():
        assert known.link(device.link).bytes_per_s > 0
        assert device.usable_bytes > 0 and 0 < device.matmul_share <= 1


def test_a_file_describes_devices_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(
        "cluster: {device: H101, nodes: 2, per_node: 4, between: ours}\n"
        "devices: {H101: {tflops_bf16: 900, tflops_fp32: 60, memory_gb: 96, memory_gb_per_s: 4000, matmul_share: 0.6, "
        "memory_share: 0.8, call_s: 4.0e-6, reserved_gb: 2, link: NVLink4}}\n"
        "links: {ours: {gb_per_s: 40, alpha_s: 1.0e-5}}\n"
    )
    found = parse_cluster(str(path))
    assert (found.size, found.device.memory_gb, found.between.gb_per_s) == (8, 96, 40)


def test_all_mistakes_of_a_file_are_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text("cluster: {device: X}\nlinks: {ours: {gb_per_second: 40, alpha_s: fast}}\n")
    with pytest.raises(ConfigError) as raised:
        parse_cluster(str(path))
    assert len(raised.value.problems) == 3
    assert "did you mean 'gb_per_s'" in str(raised.value)
