"""Random pauses do not advance the global generator: a task's draws do not depend on earlier failures."""

from __future__ import annotations

import random
import re
from pathlib import Path

import tenacity

from rendezvous.pauses import RandomExponential, between

REPOSITORY = Path(__file__).parents[2]


def test_pauses_do_not_draw_from_the_global_generator() -> None:
    before = random.getstate()
    assert 1.0 <= between(1.0, 2.0) <= 2.0
    pauses = list[float]()
    again = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(9), wait=RandomExponential(multiplier=0.5, max=2.0), sleep=pauses.append
    )
    tries = iter([*[OSError()] * 8, None])

    def fail() -> None:
        if (error := next(tries)) is not None:
            raise error

    again(fail)
    most = [0.5, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert len(pauses) == 8 and all(0 <= pause <= limit for pause, limit in zip(pauses, most, strict=True))
    assert len(set(pauses)) == 8 and random.getstate() == before


def test_no_module_of_ours_draws_from_the_global_generator() -> None:
    """Only the module that seeds it for a task's draws may seed or inspect it."""
    names = "random|uniform|choices?|sample|shuffle|randint|randrange|gauss"
    drawing = re.compile(rf"(?<![\w.])random\.({names})\(|wait_random\w*\(")
    files = [file for package in ("elastic_train", "rendezvous") for file in (REPOSITORY / package).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if drawing.search(file.read_text())] == []
