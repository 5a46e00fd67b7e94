"""Orders for tasks: each is executed once, and its outcome can be read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore, Thread

import pytest

from chaos.tasks.orders import Orders, done_by, give
from elastic_train.system.failpoints import VARIABLE
from tests.conftest import PATIENCE_S


@pytest.fixture
def restless() -> Iterator[None]:
    """Make threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_an_order_that_waits_is_not_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert give(tmp_path, "flip") and not give(tmp_path, "flip")
    assert Orders().take("flip") == tmp_path / f"flip.{os.getpid()}"
    assert Orders().take("flip") is None and give(tmp_path, "flip")


@pytest.mark.heavy
@pytest.mark.usefixtures("restless")
def test_what_was_done_at_once_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many orders is executed as soon as its file exists, and its answer stays until the next one."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    orders, num, answered = Orders(), 300, Semaphore(0)

    def carry_out() -> None:
        for number in range(num):
            while (said := orders.take("flip")) is None:
                pass
            said.write_text(str(number))
            answered.release()

    Thread(target=carry_out, daemon=True).start()
    for number in range(num):
        assert give(tmp_path, "flip")
        assert answered.acquire(timeout=PATIENCE_S)
        assert done_by(tmp_path, "flip") == str(number)
