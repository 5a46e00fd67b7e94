"""Compiled blocks: only for calls with the shapes of the first micro-batch, and refused where impossible."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_train.config.schema import Config
from elastic_train.errors import ConfigError
from elastic_train.job.units import compiled
from elastic_train.job.units.compiled import CompiledBlocks, check_can_compile, decide
from elastic_train.tasks.causal_lm import CausalLM
from elastic_train.tasks.task import Task
from elastic_train.tasks.text_classifier import TextClassifier


class Block(nn.Module):
    """A call with two tensors and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        return scale * self.linear(x if mask is None else x * mask)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 0.5) -> Tensor:
        for block in self.blocks:
            x = block(x, mask=mask, scale=scale)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of calls to compiled kernels, which are torch's ordinary ones here."""
    calls: list[tuple[int, ...]] = []

    def compile_(forward: Callable[..., Tensor], *, dynamic: bool, options: dict[str, Any]) -> Callable[..., Tensor]:
        assert not dynamic and options["deterministic"]

        def compiled(x: Tensor, **named: Any) -> Tensor:
            calls.append(tuple(x.shape))
            return forward(x, **named)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_)
    return calls


def test_calls_of_the_first_micro_batch_alone_are_compiled(
    compiled_calls: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """Other shapes, masks or numbers run uncompiled, as do calls without gradients. The log says so once."""
    model = Net().train()
    compiled = CompiledBlocks(model)
    with compiled.learning():
        model(torch.ones(3, 4))
    assert compiled_calls == [(3, 4)] * 2
    assert [line.partition(":")[0] for line in compiled.described()] == ["blocks.0", "blocks.1"]
    compiled_calls.clear()
    with caplog.at_level(logging.WARNING):
        model(torch.ones(2, 4))
        model(torch.ones(3, 4), mask=torch.ones(4))
        model(torch.ones(3, 4), scale=0.25)
        with torch.no_grad():
            model(torch.ones(3, 4))
        model.eval()(torch.ones(3, 4))
    assert compiled_calls == []
    assert caplog.text.count("has not the shape of the run's first one") == 1
    assert "6 calls of 6 of blocks in training (100.0 %) ran uncompiled" in str(compiled.describe_share())
    model.train()(torch.zeros(3, 4))
    assert compiled_calls == [(3, 4)] * 2


@pytest.mark.parametrize(("learned", "given"), [(1, 1.0), (1.0, True), (True, 1)])
def test_equal_numbers_of_other_types_are_other_calls(
    compiled_calls: list[tuple[int, ...]], learned: float, given: float
) -> None:
    """Torch would compile again for them, which ends training with an error of the compiler."""
    model = Net().train()
    with CompiledBlocks(model).learning():
        model(torch.ones(3, 4), scale=learned)
    compiled_calls.clear()
    model(torch.ones(3, 4), scale=given)
    assert compiled_calls == []


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_what_is_compiled_of_a_gpus_block_is_kept_with_its_own_code(
    monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool
) -> None:
    """Torch stores compiled code with the function's code and checks all of it per call: in a deep model, every other
    block's as well. On CPUs identical blocks share compiled code as long as they share their code."""
    given: list[Any] = []

    def compile_(forward: Any, **_: Any) -> Any:
        given.append(forward)
        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    if is_on_gpu:
        monkeypatch.setattr(compiled, "_is_on_gpu", lambda block: True)
    model, inputs = Net().train(), torch.ones(3, 4)
    expected = model(inputs)
    with CompiledBlocks(model).learning():
        assert torch.equal(model(inputs), expected)
    codes = [forward.__code__ for forward in given]
    if not is_on_gpu:
        assert codes == [Block.forward.__code__] * 2
        return
    assert len(set(codes)) == len(codes) == 2 and Block.forward.__code__ not in codes
    assert [code.co_name for code in codes] == ["forward of blocks.0", "forward of blocks.1"]


def test_what_is_compiled_tells_ranks_apart(compiled_calls: list[tuple[int, ...]]) -> None:
    """Ranks differ by shapes and names, not by values in a tensor."""
    described = []
    for x, mask in ((torch.ones(3, 4), None), (torch.zeros(3, 4), None), (torch.ones(3, 4), torch.ones(4))):
        model = Net().train()
        compiled = CompiledBlocks(model)
        with compiled.learning():
            model(x, mask=mask)
        described.append(compiled.described())
    assert described[0] == described[1] != described[2]


def test_a_model_without_blocks_is_compiled_whole(compiled_calls: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    compiled = CompiledBlocks(model)
    with compiled.learning():
        model(torch.ones(3, 4))
    assert compiled_calls == [(3, 4)]
    assert str(compiled).startswith("the whole model compiled before training")


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(
        ConfigError, match=r"does not work with this machine, which has no C\+\+ compiler, .* install g\+\+"
    ):
        check_can_compile(torch.device("cpu"))


def test_a_model_that_torch_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the line in which a compiler reports its error."""
    from torch._dynamo.exc import BackendCompilerFailed

    said = "C++ compile error\n\nOutput:\nmain.cpp:1:10: fatal error: Python.h: No such file or directory\n"

    def fails(*arguments: object, **named: object) -> Tensor:
        raise BackendCompilerFailed(lambda: None, RuntimeError(said), None)

    monkeypatch.setattr(torch, "compile", lambda forward, **_: fails)
    model = Net().train()
    compiled, why = (
        CompiledBlocks(model),
        r"torch cannot compile \(main\.cpp:1:10: fatal error: Python\.h: No such file",
    )
    with pytest.raises(ConfigError, match=why), compiled.learning():
        model(torch.ones(3, 4))


CAUSAL_LM = CausalLM(max_tokens=8, model={"dim": 32, "depth": 1, "heads": 2, "vocabulary": 16})


@pytest.mark.parametrize(
    ("name", "task", "keys", "said"),
    [
        ("NVIDIA H200", CAUSAL_LM, {}, "is true here"),
        ("NVIDIA A100-SXM4-80GB", CAUSAL_LM, {}, "false here: it was not measured on NVIDIA A100"),
        ("NVIDIA H200", TextClassifier(vocabulary=8), {}, "false here: it was measured with the decoder"),
        ("NVIDIA H200", CAUSAL_LM, {"precision": "fp32"}, "false here: it was measured in bf16"),
        (
            "NVIDIA H200",
            CAUSAL_LM,
            {"parallel": {"shards": "parameters"}},
            "false here: compiling needs the whole model",
        ),
        ("NVIDIA H200", CAUSAL_LM, {"parallel": {"recompute": "selective"}}, "false here: recompute: selective"),
    ],
)
def test_auto_compiles_where_it_was_measured_to_help(
    monkeypatch: pytest.MonkeyPatch, name: str, task: Task, keys: dict[str, object], said: str
) -> None:
    """On a GPU the log says what it resolves to; on CPUs it means false."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    config = Config.model_validate({"data": {"train": "here"}, "precision": "bf16", **keys})
    gpu = torch.device("cuda")
    is_on, line = decide(config, task, gpu)
    assert line is not None and said in line and is_on == ("is true" in said)
    assert decide(config, task, torch.device("cpu")) == (False, None)
    for asked in (True, False):
        if keys.get("parallel") != {"recompute": "selective"}:
            assert decide(Config.model_validate({**config.model_dump(), "compile": asked}), task, gpu) == (asked, None)
    resolved = config.compiling(is_on)
    assert resolved.compile is is_on and resolved.as_written.compile == "auto"
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    assert not decide(config, task, gpu)[0]
