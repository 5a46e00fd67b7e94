"""Which attention a block takes that is compiled for a GPU; what it computes is tested on one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from elastic_train.tasks.decoder.causal_attention import is_compiled_for


@pytest.mark.parametrize(
    ("is_compiling", "is_cuda", "width", "is_deterministic", "expected"),
    [
        (True, True, 16, True, True),
        (True, True, 8, True, False),  # it would be refused
        (True, True, 16, False, False),
        (True, False, 16, True, False),
        (False, True, 16, True, False),
    ],
)
def test_one_kernel_is_taken_where_it_is_compiled_and_needed_and_heads_are_wide_enough(
    monkeypatch: pytest.MonkeyPatch,
    is_compiling: bool,
    is_cuda: bool,
    width: int,
    is_deterministic: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    query = SimpleNamespace(is_cuda=is_cuda, shape=torch.Size((1, 2, 8, width)))
    assert is_compiled_for(query) == expected  # type: ignore[arg-type]
