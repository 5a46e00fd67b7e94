"""Measure the cost of grains: their norm and digest against torch's norm and one hash, and clipping in a step.

    python -m benchmarks.grains [--million 16] [--json]

Every time is the least of five. One thread, as ranks on CPUs have by default.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable

import torch

from elastic_train.config.recipe import OptimizerConfig
from elastic_train.job.build import build_state
from elastic_train.parallel.devices.squares import squares_of_tensors
from elastic_train.parallel.gradient_sum import place_gradients
from elastic_train.placement.digest import digests_of
from elastic_train.placement.grains import bounds_of
from elastic_train.placement.norm import total_norm
from elastic_train.tasks.text_classifier import TextClassifier


def least_ms(act: Callable[[], object], tries: int = 5) -> float:
    """Return the shortest of several runs, in milliseconds."""
    times = []
    for _ in range(tries):
        started = time.perf_counter()
        act()
        times.append(1e3 * (time.perf_counter() - started))
    return round(min(times), 2)


def measure_sums(num_elements: int) -> dict[str, float]:
    """Return the milliseconds of norms, an update and digests of `num_elements` float32 elements."""
    parameter = torch.nn.Parameter(torch.zeros(num_elements))
    parameter.grad = torch.randn(num_elements, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    grad, content = parameter.grad, memoryview(parameter.detach().numpy().tobytes())
    return {
        "norm_by_grains_ms": least_ms(lambda: total_norm(squares_of_tensors([(grad, None)]).numpy())),
        "norm_by_torch_ms": least_ms(lambda: torch.nn.utils.get_total_norm([grad])),
        "adamw_ms": least_ms(optimizer.step),
        "digest_by_grains_ms": least_ms(lambda: digests_of(content, 4, bounds_of((num_elements,), None))),
        "digest_whole_ms": least_ms(lambda: hashlib.sha256(content).digest()),
    }


def measure_clipping(dim: int, depth: int, num_tokens: int) -> dict[str, object]:
    """Return the cost of clipping and of the rest of a text classifier's step: four lanes of eight texts, AdamW.

    All are timed in turn, so that other work on the machine affects them equally; milliseconds.
    """
    task = TextClassifier(num_tokens, dim, depth, label="label", numeric=[], categorical=[], vocabulary=32768)
    task.rows.num_classes = 4
    model = task.build_model()
    batch = {name: torch.zeros(8, 0) for name in ("numeric", "is_missing", "categories")}
    batch |= {"tokens": torch.randint(1, 32768, (8, num_tokens)), "lengths": torch.full((8,), num_tokens)}
    batch["label"] = torch.zeros(8, dtype=torch.int64)
    flats = place_gradients(list(model.parameters()))[0]
    state = build_state(model, OptimizerConfig(clip_norm=1.0), 100, "cpu", is_fp16=False)

    def compute() -> None:
        for flat in flats:
            flat.zero_()
        for _ in range(4):
            task.loss(model, batch).total.backward()  # type: ignore[no-untyped-call]

    acts: dict[str, Callable[[], object]] = {
        "lanes": compute,
        "clip": lambda: state.shards.share.clip(1e9, float(state.measure())),
        "clip_by_torch": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "update": state.optimizer.step,
    }
    least = dict.fromkeys(acts, math.inf)
    for _ in range(7):
        for name, act in acts.items():
            least[name] = min(least[name], least_ms(act, 1))
    step = least["lanes"] + least["update"]
    return {
        "parameters": sum(flat.numel() for flat in flats),
        **{f"{name}_ms": ms for name, ms in least.items()},
        "clip_in_step": round(least["clip"] / step, 4),
        "clip_by_torch_in_step": round(least["clip_by_torch"] / step, 4),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--million", type=int, default=16, help="elements of the gradient, in millions")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "sums": {"elements": options.million * 10**6, **measure_sums(options.million * 10**6)},
        "clipping": [measure_clipping(16, 1, 16), measure_clipping(64, 2, 64), measure_clipping(128, 2, 256)],
    }
    print(json.dumps(found, indent=None if options.json else 2))


if __name__ == "__main__":
    main()
