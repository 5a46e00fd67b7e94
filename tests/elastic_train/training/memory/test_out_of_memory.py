"""Out-of-memory errors: the text that is added and the files that are written; the original error always propagates."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from elastic_train.config.schema import Config
from elastic_train.errors import PeerLostError
from elastic_train.insight.phases import FOLDER, MemoryFacts, memory_facts_of
from elastic_train.training import memory
from elastic_train.training.memory import (
    MOST_KEPT,
    MOST_LISTED,
    MOST_RECORDED,
    MOST_TEXT,
    Meter,
    Moment,
    is_out_of_memory,
    note_out_of_memory,
    record_allocations,
    remedies,
)
from rendezvous.waiting import begin

CPU = torch.device("cpu")
MOMENT = Moment(term=4, rank=3, num_ranks=8, step=12, lane=5)


def config(folder: Path, **tree: Any) -> Config:
    return Config.model_validate({"run": {"dir": str(folder)}, "data": {"train": "data/rows"}, **tree})


def noted(folder: Path, error: BaseException, meter: Meter | None = None, moment: Moment | None = MOMENT) -> str:
    """Return the text that is added to an error."""
    note_out_of_memory(error, config(folder), meter or Meter(CPU), moment)
    return "\n".join(getattr(error, "__notes__", ()))


def too_large() -> RuntimeError:
    """Return torch's error for a tensor that does not fit the host's memory."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (MemoryError(), True),
        (too_large(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (PeerLostError("rank 0 of 2: a collective failed: out of memory"), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_which_errors_are_of_memory(error: Exception, is_it: bool, tmp_path: Path) -> None:
    """Only out-of-memory errors are analysed."""
    assert is_out_of_memory(error) == is_it
    assert bool(noted(tmp_path, error)) == (tmp_path / FOLDER).exists() == is_it


@pytest.mark.heavy
def test_a_snapshot_says_what_took_the_memory_and_the_error_where_it_is(tmp_path: Path) -> None:
    """The moment, the categories, the largest tensors in and outside them, and the stack."""
    torch.manual_seed(0)
    model, batch = nn.Linear(3000, 2000, bias=False), torch.zeros(5_000_000)
    held = [("weights", model.weight), ("sums", torch.zeros(4_000_000))]
    try:
        raise too_large()
    except RuntimeError as raised:
        error = raised
        note_out_of_memory(error, config(tmp_path), Meter(CPU), MOMENT, held, model)
        note_out_of_memory(error, config(tmp_path), Meter(CPU))  # the error passes a second handler
    [note] = error.__notes__
    path = tmp_path / FOLDER / "00000004-00003.json"
    assert note.startswith("out of memory: rank 3, step 12, lane 5, cpu: at its peak ")
    assert "weights 24 MB" in note and "sums 16 MB" in note and f"; snapshot: {path}. To use less memory: " in note
    found = json.loads(path.read_text())
    assert (found["term"], found["rank"], found["num_ranks"], found["step"], found["lane"]) == (4, 3, 8, 12, 5)
    facts = memory_facts_of(found["memory"])
    assert facts is not None and facts.parts["weights"] == 24_000_000 and facts.peak >= facts.program > 0
    assert 0 < found["free"] < found["total"] and found["configuration"]["batch"]["micro_batch"] == 8
    assert "DefaultCPUAllocator" in found["error"][0] and any("too_large" in line for line in found["traceback"])
    listed = [(one["part"], one["bytes"], one["name"], one["shape"]) for one in found["largest"]]
    assert ("weights", 24_000_000, "weight", [2000, 3000]) in listed
    assert ("other", batch.nbytes, None, [5_000_000]) in listed and ("sums", 16_000_000, None, [4_000_000]) in listed
    assert [size for _, size, _, _ in listed] == sorted((size for _, size, _, _ in listed), reverse=True)
    assert len(listed) <= MOST_LISTED


@pytest.mark.heavy
def test_before_the_first_world_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert "out of memory: rank 5, before its first world, cpu: " in noted(tmp_path, MemoryError(), moment=None)
    assert (tmp_path / FOLDER / "00000000-00005.json").exists()


@pytest.mark.heavy
def test_snapshots_are_small_and_few(tmp_path: Path) -> None:
    """This holds for errors of any length and any number of failures of a rank; other ranks' files are kept."""
    noted(tmp_path, MemoryError("x" * 10**6))
    for term in range(10, 16):
        noted(tmp_path, MemoryError(), moment=Moment(term, 1, 2, 7, None))
    kept = sorted(path.name for path in (tmp_path / FOLDER).iterdir())
    assert kept == ["00000004-00003.json", *(f"{term:08d}-00001.json" for term in range(16 - MOST_KEPT, 16))]
    assert all(path.stat().st_size < 4 * MOST_TEXT for path in (tmp_path / FOLDER).iterdir())
    assert "snapshot: " in noted(tmp_path, MemoryError(), moment=Moment(0, 1, 2, None, None))
    assert (tmp_path / FOLDER / "00000000-00001.json").exists(), "the newest is kept, whatever its term"


@pytest.mark.heavy
def test_a_folder_that_takes_no_file_costs_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that hangs also costs only the file: the error says so, and still says what to change."""
    (tmp_path / FOLDER).write_text("in the way")
    note = noted(tmp_path, MemoryError())
    assert "00000004-00003.json could not be written: " in note and "To use less memory: " in note
    monkeypatch.setattr(memory, "WRITE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(memory, "begin", lambda name, call: begin(name, lambda: __import__("time").sleep(0.5)))
    assert "could not be written: no answer in 0 s. To use less memory: " in noted(tmp_path, MemoryError())


def test_where_there_is_no_memory_for_a_snapshot_the_error_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> MemoryFacts:
        raise MemoryError("nothing left")

    monkeypatch.setattr(Meter, "measure", fails)
    note = noted(tmp_path, MemoryError())
    assert "rank 3, step 12, lane 5, cpu; no snapshot could be taken: nothing left. To use less memory: " in note


@pytest.mark.parametrize(
    ("tree", "num_ranks", "expected"),
    [
        ({}, 1, ["parallel.recompute: units", "in a new run, batch.micro_batch below 8"]),
        ({}, 2, ["parallel.recompute: units", "in a new run, batch.micro_batch below 8"]),  # each would hold all of it
        ({}, 3, ["parallel.recompute: units", "parallel.shards: optimizer", "in a new run, batch.micro_batch below 8"]),
        (
            {"parallel": {"shards": "gradients", "recompute": "units"}, "batch": {"micro_batch": 1}},
            3,
            ["parallel.shards: parameters"],
        ),
        (
            {
                "parallel": {"shards": "gradients"},
                "run": {"dir": "runs", "audit_lanes": 4},
                "batch": {"micro_batch": 1},
            },
            4,
            ["parallel.recompute: units", "parallel.shards: parameters"],
        ),
        ({"parallel": {"tensor": 2, "recompute": "units"}}, 4, ["in a new run, batch.micro_batch below 8"]),
        (
            {"parallel": {"tensor": 2, "recompute": "units"}, "batch": {"micro_batch": 1}},
            6,
            ["parallel.shards: optimizer"],
        ),
        (
            {"parallel": {"pipeline": 2, "recompute": "units", "shards": "optimizer"}, "batch": {"micro_batch": 1}},
            6,
            ["parallel.shards: gradients"],
        ),
        (
            {"parallel": {"tensor": 2, "recompute": "units", "shards": "gradients"}, "batch": {"micro_batch": 1}},
            6,
            ["parallel.shards: parameters"],
        ),
        (
            {"parallel": {"pipeline": 2, "recompute": "units", "shards": "gradients"}, "batch": {"micro_batch": 1}},
            6,
            [],
        ),
        (
            {"parallel": {"expert": 2}},
            6,
            ["parallel.recompute: units", "parallel.shards: optimizer", "in a new run, batch.micro_batch below 8"],
        ),
        ({"reduction": "fast", "parallel": {"recompute": "units"}, "batch": {"micro_batch": 1}}, 4, []),
    ],
)
def test_what_takes_less_is_what_is_not_set_yet(
    tmp_path: Path, tree: dict[str, Any], num_ranks: int, expected: list[str]
) -> None:
    said = remedies(config(tmp_path, **tree), num_ranks)
    for key, value in (one.removeprefix("parallel.").split(": ") for one in expected if one.startswith("parallel.")):
        config(tmp_path, **{**tree, "parallel": {**tree.get("parallel", {}), key: value}})  # the key can be set
    listed = "; ".join(expected) or "a smaller model, or a device with more memory"
    assert said == f"To use less memory: {listed}. `elastic-train plan CONFIG --by memory` says how much"


class FakeAllocator:
    """torch's allocator statistics of a GPU, on a machine without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, traces: list[list[object]]) -> None:
        self.traces = traces
        answers = {
            "max_memory_allocated": 70 << 30,
            "max_memory_reserved": 79 << 30,
            "mem_get_info": (1 << 20, 80 << 30),
        }
        for name, answer in {**answers, "memory_summary": "| allocated |\n"}.items():
            monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": self.traces})


@pytest.mark.heavy
def test_on_a_gpu_what_the_allocator_knows_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has its summary, and its recorded history if recording was on and the history is not too large."""
    gpu, meter = FakeAllocator(monkeypatch, [[]]), Meter(torch.device("cuda:0"))
    path = tmp_path / FOLDER / "00000004-00003.json"
    note = noted(tmp_path, torch.OutOfMemoryError("CUDA out of memory"), meter)
    assert "lane 5, cuda:0: at its peak 75.2 GB (rest 75.2 GB); snapshot: " in note
    assert "parallel.offload: optimizer; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment; " in note
    found = json.loads(path.read_text())
    assert (found["free"], found["total"], found["allocator"]) == (1 << 20, 80 << 30, ["| allocated |"])
    assert found["memory"]["reserved"] == 79 << 30 and not path.with_suffix(".pickle").exists()
    gpu.traces = [[{"action": "alloc", "size": 512}]]
    noted(tmp_path, torch.OutOfMemoryError("CUDA out of memory"), meter)
    assert pickle.loads(path.with_suffix(".pickle").read_bytes())["device_traces"] == gpu.traces
    path.with_suffix(".pickle").unlink()
    asked = Mock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", asked)
    record_allocations(CPU)
    assert not asked.called
    record_allocations(torch.device("cuda:0"))
    assert asked.call_args.kwargs["max_entries"] == MOST_RECORDED
    monkeypatch.setattr(memory, "MOST_RECORDED_BYTES", 10)
    assert "; snapshot: " in noted(tmp_path, torch.OutOfMemoryError("CUDA out of memory"), meter)
    assert not path.with_suffix(".pickle").exists()
