"""Models that people train, beside plain PyTorch, and with keys that change how they compute.

step_vs_plain         tokens or images a second over those of a hand-written loop in plain PyTorch, of the same model,
                      optimizer and tensors, on one rank of four lanes; the trainer is the whole one, with its reading,
                      histories and tables (goal: at least 0.97)
peak_memory_vs_plain  the most resident memory of a rank of one lane above what its process had before, over that of the
                      plain loop, whose tensors are there before (goal: at most 1.15)
key_step_vs_plain     as step_vs_plain, with a key that changes how a step computes: compile, bf16, recompute; the plain
                      loop is as ever, in fp32 and not compiled
key_peak_vs_plain     as peak_memory_vs_plain, with the key
chunked_loss_peak     the most memory of passes of a decoder with 50,304 token ids, whose loss is computed by chunks of
                      tokens, over that from the logits of all tokens, by the tokens of a row
chunked_loss_time     the same of processor time
packed_vs_mask        the time of passes of a packed row of 1,024 tokens over that with a mask, by its documents

The jobs: a decoder of 1.2 M parameters on rows of 128 tokens, a BERT of 1.1 M on the same (30 M and 27 M for peaks),
and a ResNet-18 on images of 64 x 64 pixels; every micro-batch has 8 of them. Both sides compute with one thread, in
turn, in one process. The last line is JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from benchmarks.beside import in_process
from benchmarks.figures import Effort, Measure, measure_chosen
from benchmarks.models.jobs import JOBS
from benchmarks.models.measure import passes_of, peak_of_ours, peak_of_plain, throughput
from benchmarks.packed import packed_over_mask
from elastic_train.tasks.decoder.model import DecoderShape

Keys = Mapping[str, object]

KEYS: Mapping[str, Keys] = {
    "compile": {"compile": "true"},
    "bf16": {"precision": "bf16"},
    "recompute_units": {"parallel.recompute": "units"},
    "recompute_selective": {"parallel.recompute": "selective"},
}


def in_chunks(effort: Effort) -> dict[str, object]:
    """Compare passes whose loss is computed in chunks with those that keep all logits."""
    peaks, times = dict[str, float](), dict[str, float]()
    for num_tokens in (2048,) if effort.is_quick else (2048, 4096):
        peak, seconds = in_process(passes_of, num_tokens, in_chunks=True)
        whole_peak, whole_s = in_process(passes_of, num_tokens, in_chunks=False)
        peaks[str(num_tokens)], times[str(num_tokens)] = round(peak / whole_peak, 3), round(seconds / whole_s, 3)
        effort.say(
            f"{num_tokens} tokens: {peak / 1e6:.0f} MB and {seconds:.1f} s by chunks, {whole_peak / 1e6:.0f} MB and "
            f"{whole_s:.1f} s with all logits"
        )
    return {"chunked_loss_peak": peaks, "chunked_loss_time": times}


def packed(effort: Effort) -> dict[str, object]:
    """Compare passes of packed rows with those that have a mask."""
    shape, found = DecoderShape(vocabulary=2048, dim=256, depth=4, heads=4), dict[str, float]()
    for number in (4, 16, 64):
        ratio = in_process(packed_over_mask, shape, 1024, number, "cpu", 4 if effort.is_quick else 12)
        found[str(number)] = round(ratio, 3)
        effort.say(f"{number} documents: {ratio:.3f} of the time with a mask")
    return {"packed_vs_mask": found}


def _throughput(effort: Effort, name: str, key: Keys) -> float:
    found = in_process(throughput, name, 12 if effort.is_quick else 40, key)
    effort.say(f"{_called(name, key)}: {found:.3f} of the plain loop's samples a second")
    return round(found, 3)


def _peak(effort: Effort, name: str, key: Keys) -> float:
    """Return the ratio of the medians of fresh processes."""
    pairs = [
        (in_process(peak_of_ours, name, key), in_process(peak_of_plain, name))
        for _ in range(1 if effort.is_quick else 3)
    ]
    ours, plain = (statistics.median(peaks) for peaks in zip(*pairs, strict=True))
    effort.say(f"{_called(name, key)}: {ours / 1e6:.0f} MB above the base, plain loop {plain / 1e6:.0f} MB")
    return round(float(ours / plain), 3)


def _called(name: str, key: Keys) -> str:
    return " ".join([name, *(f"{key_name}={value}" for key_name, value in key.items())])


def _by_job(figure: str, measure: Callable[[Effort, str, Keys], float]) -> Measure:
    return lambda effort: {figure: {name: measure(effort, name, {}) for name in JOBS}}


def _by_key(figure: str, measure: Callable[[Effort, str, Keys], float]) -> Measure:
    return lambda effort: {figure: {f"{key}_{name}": measure(effort, name, KEYS[key]) for key in KEYS for name in JOBS}}


FIGURES: dict[str, Measure] = {
    "step_vs_plain": _by_job("step_vs_plain", _throughput),
    "peak_memory_vs_plain": _by_job("peak_memory_vs_plain", _peak),
    "key_step_vs_plain": _by_key("key_step_vs_plain", _throughput),
    "key_peak_vs_plain": _by_key("key_peak_vs_plain", _peak),
    "chunked_loss_peak": in_chunks,
    "chunked_loss_time": in_chunks,
    "packed_vs_mask": packed,
}


if __name__ == "__main__":
    measure_chosen("benchmarks.models", __doc__, FIGURES)
