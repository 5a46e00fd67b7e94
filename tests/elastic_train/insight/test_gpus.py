"""Figures of GPUs on a node's page: under the exporter's names, in its units, and only those that a GPU has."""

from __future__ import annotations

import sys
import urllib.request

import pynvml
import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_train.insight.page import Facts, Page
from tests.conftest import PATIENCE_S
from tests.elastic_train.insight.nvml_library import Device, NvmlLibrary


def driver(patch: pytest.MonkeyPatch, *devices: Device) -> None:
    """Let pynvml find a library of a machine with these GPUs."""
    patch.setattr(pynvml, "nvmlLib", NvmlLibrary([*devices]))
    patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})


def gpus_on_page() -> dict[tuple[str, str], float]:
    """Return what a scrape of a new page says of GPUs, by name without its prefix and by the GPU's number."""
    page = Page(Facts(), "words", "n1")
    page.open("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page.port}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    finally:
        page.close()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert any(sample.name == "elastic_train_step" for sample in samples), "all else is there"
    found = [sample for sample in samples if sample.name.startswith("DCGM_")]
    for sample in found:
        number = sample.labels["gpu"]
        known = {"run": "words", "node": "n1", "gpu": number, "UUID": f"GPU-{number}"}
        assert sample.labels == {**known, "modelName": "NVIDIA H100 80GB HBM3"}
    return {(sample.name.removeprefix("DCGM_FI_DEV_"), sample.labels["gpu"]): sample.value for sample in found}


def test_each_gpu_has_its_figures_in_the_exporters_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in MiB and power in watts, of every GPU of the node."""
    driver(monkeypatch, Device(), Device(busy=(3, 1), temperature=40, num_errors=2))
    first = {"GPU_UTIL": 97, "MEM_COPY_UTIL": 41, "FB_FREE": 20480, "FB_USED": 61440, "GPU_TEMP": 61}
    first |= {"POWER_USAGE": 654.321, "SM_CLOCK": 1980, "ECC_DBE_VOL_TOTAL": 0}
    second = {**first, "GPU_UTIL": 3, "MEM_COPY_UTIL": 1, "GPU_TEMP": 40, "ECC_DBE_VOL_TOTAL": 2}
    both = {"0": first, "1": second}
    assert gpus_on_page() == {(name, gpu): value for gpu, one in both.items() for name, value in one.items()}


def test_what_a_gpu_does_not_know_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has no count of errors, and others have fallen off the bus: the page has the rest."""
    driver(monkeypatch, Device(is_away=True), Device(num_errors=None), Device(is_lost=True))
    found = gpus_on_page()
    assert len(found) == 7 and {gpu for _, gpu in found} == {"1"}
    assert ("ECC_DBE_VOL_TOTAL", "1") not in found


@pytest.mark.parametrize("lacks", ["package", "driver"])
def test_a_machine_without_gpus_has_none_on_its_page(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is said that an operator would have to look at."""
    if lacks == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    else:
        driver(monkeypatch)
        monkeypatch.delattr(pynvml.nvmlLib, "nvmlInitWithFlags")
    assert gpus_on_page() == {}
