"""Choice of the attention kernel: the first that passes a probe. CPUs stand in for the GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.parallel.attention import choice, kernels, probe
from elastic_train.parallel.attention.choice import Recorder, adopt, choose, fingerprint
from elastic_train.parallel.attention.documents import documents_of
from elastic_train.parallel.attention.kernels import (
    KERNELS,
    Call,
    Kernel,
    Machine,
    causal_kernel,
    masks_documents,
    sdpa,
)
from elastic_train.parallel.attention.probe import check_repeats
from elastic_train.parallel.devices import repeats
from elastic_train.parallel.devices.repeats import NotRepeatableError
from elastic_train.parallel.devices.switches import KeptSwitches, switches
from elastic_train.tasks.decoder.model import Decoder, DecoderShape

CPU = Machine(torch.device("cpu"), (9, 0), compiles=False)
CAUSAL = Call((1, 4, 16, 8), (1, 2, 16, 8), torch.float32, is_causal=True)
WHOLE = replace(CAUSAL, is_causal=False)
PACKED = replace(CAUSAL, lengths=(5, 10, 1))
TORCHS, MATH, VARLEN = KERNELS[-3:]


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(choice, "_current", None)
    monkeypatch.setattr(kernels, "_causal", kernels.FLEX)
    monkeypatch.setattr(kernels, "_packed", kernels.MASK)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    yield
    kernels._restore()


def kernel(name: str, *, of: Any = "sdpa", obstacle: str | None = None, fails: bool = False) -> Kernel:
    def activate() -> None:
        if fails:
            raise ImportError("libflash.so: cannot open")
        ACTIVE.append(name)

    return Kernel(name, lambda machine, call: obstacle, activate, sdpa, of)


ACTIVE: list[str] = []
TORCH = kernel("torch")


def admitting(*names: str) -> choice.Check:
    def check(kernel: Kernel, call: Call, device: torch.device, *, compiles: bool) -> None:
        if kernel.name not in names:
            raise NotRepeatableError("two runs gave different bits")

    return check


@pytest.mark.parametrize(
    ("several", "admitted", "calls", "name"),
    [
        ([kernel("fast"), TORCH], ["fast", "torch"], [CAUSAL], "fast"),
        ([kernel("fast"), TORCH], ["torch"], [CAUSAL], "torch"),
        ([kernel("fast", obstacle="old"), kernel("next", fails=True), TORCH], ["torch"], [CAUSAL], "torch"),
        ([kernel("own", of="decoder"), TORCH], ["own", "torch"], [CAUSAL, WHOLE], "own, elsewhere torch"),
        ([kernel("own", of="decoder"), TORCH], ["own", "torch"], [WHOLE], "torch"),
        ([kernel("fast"), kernel("own", of="decoder"), TORCH], ["fast", "own", "torch"], [CAUSAL], "fast"),
        ([kernel("fast"), TORCH], ["fast"], [], "torch"),
    ],
)
def test_the_first_kernel_that_repeats_its_bits_is_taken(
    several: list[Kernel], admitted: list[str], calls: list[Call], name: str
) -> None:
    found = choose(calls, CPU, several, admitting(*admitted))
    assert found.name == name and fingerprint(compiles=False) == name
    assert str(found).startswith(f"attention is computed by {name}")
    assert not set(found.refused) & set(name.split(", elsewhere "))


PACKS = kernel("varlen", of="documents")


@pytest.mark.parametrize(
    ("admitted", "calls", "name"),
    [
        (["fast", "varlen", "torch"], [PACKED], "fast, packed rows by varlen"),
        (["varlen", "torch"], [PACKED, WHOLE], "torch, packed rows by varlen"),
        (["fast", "torch"], [PACKED], "fast, packed rows by mask"),
        (["own", "fast", "varlen"], [PACKED, CAUSAL], "own, elsewhere fast, packed rows by varlen"),
        (["fast", "varlen"], [CAUSAL], "fast"),
    ],
)
def test_packed_rows_are_computed_by_the_flash_attention_that_was_chosen(
    admitted: list[str], calls: list[Call], name: str
) -> None:
    """If both repeat their bits; other ranks take all of the choice, or none of it. Unproven, it is not used."""
    several = [kernel("own", of="decoder"), kernel("fast"), TORCH, PACKS]
    found = choose(calls, CPU, several, admitting(*admitted))
    assert found.name == name and fingerprint(compiles=False) == name
    assert masks_documents(torch.device("cuda")) == ("varlen" not in name)
    assert not masks_documents(CPU.device)
    assert adopt("torch, packed rows by mask", CPU, several) and masks_documents(torch.device("cuda"))
    assert adopt(name, CPU, several) and fingerprint(compiles=False) == name
    assert adopt("torch, packed rows by varlen", CPU, several) == ("varlen" in name)


@pytest.mark.parametrize(
    ("call", "reason"),
    [(PACKED, "torch.float32, heads of 8"), (replace(PACKED, dtype=torch.bfloat16), "compute capability 7.5")],
)
def test_packed_rows_have_a_mask_where_no_flash_attention_is(call: Call, reason: str) -> None:
    old = Machine(torch.device("cuda"), (7, 5) if "7.5" in reason else (9, 0), compiles=False)
    assert choose([call], old, KERNELS, admitting("torch", "varlen")).refused["varlen"] == reason


@pytest.mark.parametrize("lengths", [(5, 10, 1), (2000, 48)])
def test_the_real_kernel_of_packed_rows_passes_the_probe(lengths: tuple[int, ...], monkeypatch: Any) -> None:
    """A CPU computes the documents one by one; a wrong one does not pass, whatever the first tokens show."""
    monkeypatch.setattr(probe, "_of_another_process", lambda kernel, call, device, mine, *, compiles: mine)
    tokens = sum(lengths)
    call = replace(PACKED, query=(1, 4, tokens, 8), key=(1, 2, tokens, 8), lengths=lengths, dtype=torch.bfloat16)
    check_repeats(VARLEN, call, CPU.device, compiles=False)
    whole = replace(VARLEN, attend=lambda query, key, value, call: sdpa(query, key, value, CAUSAL))
    if lengths[0] < 1000:
        with pytest.raises(NotRepeatableError, match="plain arithmetic"):
            check_repeats(whole, call, CPU.device, compiles=False)


def test_calls_of_packed_rows_are_seen() -> None:
    model = Decoder(DecoderShape(vocabulary=32, dim=32, depth=2, heads=4, kv_heads=2))
    with torch.no_grad(), Recorder(torch.bfloat16) as seen:
        model(torch.zeros(2, 6, dtype=torch.long), mask=documents_of([6, 1, 5], CPU.device))
    assert list(seen.calls) == [Call((2, 4, 6, 8), (2, 2, 6, 8), torch.bfloat16, is_causal=True, lengths=(6, 1, 5))]


def test_a_start_says_why_faster_kernels_are_not_taken() -> None:
    several = [kernel("A", obstacle="compute capability 8.0"), kernel("B", fails=True), kernel("C"), TORCH]
    assert str(choose([CAUSAL], CPU, several, admitting("torch"))) == (
        "attention is computed by torch; not A: compute capability 8.0; not B: ImportError: libflash.so: cannot open; "
        "not C: two runs gave different bits"
    )


def test_a_machine_on_which_no_kernel_repeats_its_bits_is_named() -> None:
    found = choose([CAUSAL], CPU, [kernel("fast"), TORCH, MATH], admitting())
    assert found.name == "torch" and str(found).startswith("WARNING: no kernel of attention repeats its bits")


def test_the_real_kernels_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may lack the machine type, the packages, or a compiler."""
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    old = replace(CPU, capability=(8, 0))
    found = choose([replace(CAUSAL, dtype=torch.bfloat16)], old, KERNELS, admitting("torch"))
    assert found.name == "torch"
    assert found.refused == {
        "FA4": "compute capability 8.0",
        "FA3": "compute capability 8.0",
        "cudnn": "nvidia-cudnn-frontend is not installed",
        "flex": "blocks are not compiled",
    }
    dropping = choose([replace(CAUSAL, dtype=torch.bfloat16, dropout=0.1)], CPU, KERNELS, admitting("torch"))
    assert dropping.refused == {"FA4": "dropout", "FA3": "dropout"}


class Drifting:
    """A kernel whose second run rounds differently, or whose results are wrong."""

    def __init__(self, how: str) -> None:
        self.how, self.num_runs = how, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        self.num_runs += 1
        by = {"drifts": 1.0 + 1e-6 * self.num_runs, "wrong": 1.5, "not causal": 1.0}[self.how]
        return sdpa(query, key, value, replace(call, is_causal=call.is_causal and self.how != "not causal")) * by


@pytest.mark.parametrize(
    ("how", "reason"),
    [("drifts", "two runs gave different bits"), ("wrong", "plain arithmetic"), ("not causal", "plain arithmetic")],
)
@pytest.mark.parametrize("call", [CAUSAL, replace(CAUSAL, query=(2, 4, 40, 8), key=(2, 2, 40, 8))])
def test_a_probe_finds_other_bits_and_wrong_numbers(how: str, reason: str, call: Call) -> None:
    drifting = replace(TORCHS, attend=Drifting(how))
    with pytest.raises(NotRepeatableError, match=reason):
        check_repeats(drifting, call, CPU.device, compiles=False)


@pytest.mark.slow
def test_two_processes_have_to_agree_and_one_asks_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process's result is cached for the machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    call = replace(CAUSAL, dtype=torch.bfloat16)
    check_repeats(TORCHS, call, CPU.device, compiles=False)
    monkeypatch.setattr(repeats, "_ask", None)
    check_repeats(TORCHS, call, CPU.device, compiles=False)
    path = tmp_path / "elastic-train/attention.json"
    kept = json.loads(path.read_text())
    assert len(kept) == 1
    path.write_text(json.dumps(dict.fromkeys(kept, "other")))
    with pytest.raises(NotRepeatableError, match="another process gave different bits"):
        check_repeats(TORCHS, call, CPU.device, compiles=False)


def test_another_process_that_fails_admits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged cache counts as empty, and so does one that cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "elastic-train").mkdir()
    (tmp_path / "elastic-train/attention.json").write_text("[")
    monkeypatch.setattr(repeats.sys, "executable", "/bin/false")
    with pytest.raises(NotRepeatableError, match="another process failed"):
        check_repeats(TORCHS, CAUSAL, CPU.device, compiles=False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NotRepeatableError, match="another process failed"):
        check_repeats(TORCHS, CAUSAL, CPU.device, compiles=False)


def test_a_decoders_calls_are_seen_as_autocast_computes_them() -> None:
    model = Decoder(DecoderShape(vocabulary=32, dim=32, depth=2, heads=4, kv_heads=2))
    with torch.no_grad(), Recorder(torch.bfloat16) as seen:
        model(torch.zeros(2, 6, dtype=torch.long))
        model(torch.zeros(2, 6, dtype=torch.long), mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    assert list(seen.calls) == [Call((2, 4, 6, 8), (2, 2, 6, 8), torch.bfloat16, is_causal=True)]
    assert next(iter(seen.calls)).is_plain


def test_a_rank_takes_the_kernels_of_another_that_it_has_admitted() -> None:
    several = [kernel("own", of="decoder"), kernel("fast"), TORCH]
    choose([CAUSAL], CPU, several, admitting("own", "fast", "torch"))
    assert fingerprint(compiles=False) == "own, elsewhere fast"
    ACTIVE.clear()
    assert adopt("own, elsewhere torch", CPU, several) and ACTIVE == ["torch", "own"]
    assert adopt("fast", CPU, several) and fingerprint(compiles=False) == "fast"
    assert not adopt("unknown", CPU, several) and fingerprint(compiles=False) == "fast"
    assert not adopt("torch", replace(CPU, compiles=True), several), "it has compiled the other one"


def test_a_rank_that_could_not_probe_takes_what_it_can_put_in_place() -> None:
    several = [kernel("fast"), kernel("broken", fails=True), TORCH]
    assert not adopt("broken", CPU, several)
    assert fingerprint(compiles=False) == "torch"
    choice._current = None
    assert adopt("fast", CPU, several) and fingerprint(compiles=False) == "fast"


def test_plain_arithmetic_stays_in_place_although_switches_are_set_back() -> None:
    kept, before = KeptSwitches(nn.Identity()), switches()
    choose([CAUSAL], CPU, (MATH,), admitting("math"))
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert kept.set_back() == []
    torch.backends.cuda.enable_flash_sdp(True)
    assert "enable_flash_sdp was changed from False to True" in kept.set_back()[0]
    assert not torch.backends.cuda.flash_sdp_enabled()
    kernels._restore()
    assert switches() == before and kept.set_back() == []


@pytest.mark.parametrize(
    ("causal", "is_compiling", "width", "is_deterministic", "expected"),
    [
        ("flex", True, 16, True, kernels.causal_attention),
        ("flex", True, 8, True, None),  # otherwise it would be refused
        ("flex", True, 16, False, None),
        ("flex", False, 16, True, None),
        ("cudnn", True, 16, True, kernels._by_cudnn),
        ("cudnn", False, 16, True, kernels._by_cudnn),
        ("cudnn", False, 16, False, None),
        ("FA3", True, 16, True, None),
    ],
)
def test_a_decoder_on_a_gpu_computes_by_the_kernel_that_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
    causal: str,
    is_compiling: bool,
    width: int,
    is_deterministic: bool,
    expected: object,
) -> None:
    monkeypatch.setattr(kernels, "_causal", causal)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    query = SimpleNamespace(is_cuda=True, shape=torch.Size((1, 2, 8, width)), dtype=torch.bfloat16)
    assert causal_kernel(query) is expected  # type: ignore[arg-type]
    query.is_cuda = False
    assert causal_kernel(query) is None  # type: ignore[arg-type]


def test_flex_attentions_kernels_are_pinned_by_device_and_width() -> None:
    found = kernels.options_for((9, 0), 128, torch.bfloat16)
    assert found["fwd_BLOCK_M"] == 128 and found["bwd_num_warps"] == 8
    assert all(found[f"bwd_BLOCK_N{n}"] % found[f"bwd_BLOCK_M{n}"] == 0 for n in "1")
    assert kernels.options_for((9, 0), 128, torch.float32) == kernels.options_for((7, 5), 128, torch.bfloat16) == {}
