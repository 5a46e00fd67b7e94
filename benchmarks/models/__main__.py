"""Models that people train: beside plain PyTorch and beside transformers, and keys that change how they compute.

step_vs_plain         tokens or images a second over those of a hand-written loop in plain PyTorch, of the same model,
                      optimizer and tensors, on one rank of four lanes; the trainer is the whole one, with its reading,
                      histories and tables (goal: at least 0.97)
peak_memory_vs_plain  the most resident memory of a rank of one lane above what its process had before, over that of the
                      plain loop, whose tensors are there before (goal: at most 1.15)
hf_equal              whether the loss of a run's first step is transformers' own to 1e-6, of the same weights and
                      rows, and what `export --to hf` writes after it is loaded to the last bit (goal: true)
hf_loss_apart         how far these losses are from each other, by job
one_hash              whether live jobs of 1, 2, 3 and 4 ranks, and one of whose 4 a worker is killed in the midst, end
                      with the same weights to the last bit; `lora` trains adapters of a folder's model (goal: true)
key_step_vs_plain     as step_vs_plain, with a key that changes how a step computes: compile, bf16, recompute; the plain
                      loop is as ever, in fp32 and not compiled
key_peak_vs_plain     as peak_memory_vs_plain, with the key
key_one_hash          as one_hash, with the key, over 1, 3 and 4 ranks and a kill; each key has its own weights
chunked_loss_peak     the most memory of passes of a decoder with 50,304 token ids, whose loss is computed by chunks of
                      tokens, over that from the logits of all tokens, by the tokens of a row
chunked_loss_time     the same of processor time
over_ddp_on_slow_wire
                      tokens or images a second over those of DDP with its overlap, two ranks of one lane, models of
                      30, 27 and 11 million parameters, on a network on which exchanging the gradient after the backward
                      pass is half of a step (goal: at least 0.97); needs root and iproute2
overlap_on_slow_wire  the same over the trainer without overlap (goal: above 1.2)
tutorials_s           how long the commands of the tutorials on a language model, a CSV and images take, from the data
                      to the export, each in processes of its own (goal: at most 180 each)

The jobs: a decoder of 1.2 M parameters on rows of 128 tokens, a BERT of 1.1 M on the same (30 M and 27 M for peaks),
and a ResNet-18 on images of 64 x 64 pixels; every micro-batch has 8 of them. Both sides compute with one thread, in
turn, in one process. The last line is JSON.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping

from benchmarks.figures import Effort, Measure, measure_chosen
from benchmarks.models.beside import in_process, peak_of_ours, peak_of_plain, throughput
from benchmarks.models.equal import CASES, MOST_APART, beside_transformers
from benchmarks.models.hashes import hashes_of
from benchmarks.models.jobs import JOBS, LARGE
from benchmarks.models.large_vocabulary import passes_of
from benchmarks.models.slow_wire import beside_ddp
from benchmarks.models.tutorials import TUTORIALS, seconds_of

Keys = Mapping[str, object]

KEYS: Mapping[str, Keys] = {
    "compile": {"compile": "true"},
    "bf16": {"precision": "bf16"},
    "recompute_units": {"parallel.recompute": "units"},
    "recompute_selective": {"parallel.recompute": "selective"},
}
STEPS_A_TURN = 2


def step_vs_plain(effort: Effort) -> dict[str, object]:
    return {"step_vs_plain": {name: _throughput(effort, name, {}) for name in JOBS}}


def peak_memory_vs_plain(effort: Effort) -> dict[str, object]:
    return {"peak_memory_vs_plain": {name: _peak(effort, name, {}) for name in JOBS}}


def hf_equal(effort: Effort) -> dict[str, object]:
    """Compare losses and exports with those of transformers."""
    apart, are_equal = dict[str, float](), True
    for name in CASES:
        apart[name], is_loaded = in_process(beside_transformers, name)
        are_equal &= is_loaded and apart[name] <= MOST_APART
        effort.say(f"{name}: losses {apart[name]:.1e} apart, export {'equal' if is_loaded else 'DIFFERENT'}")
    return {"hf_equal": are_equal, "hf_loss_apart": apart}


def one_hash(effort: Effort) -> dict[str, object]:
    worlds = (1, 4) if effort.is_quick else (1, 2, 3, 4)
    return {"one_hash": {name: _has_one_hash(effort, name, worlds, {}) for name in (*JOBS, "lora")}}


def key_step_vs_plain(effort: Effort) -> dict[str, object]:
    return {"key_step_vs_plain": _by_key(lambda name, key: _throughput(effort, name, key))}


def key_peak_vs_plain(effort: Effort) -> dict[str, object]:
    return {"key_peak_vs_plain": _by_key(lambda name, key: _peak(effort, name, key))}


def key_one_hash(effort: Effort) -> dict[str, object]:
    worlds = (1, 4) if effort.is_quick else (1, 3, 4)
    return {"key_one_hash": _by_key(lambda name, key: _has_one_hash(effort, name, worlds, key))}


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


def on_slow_wire(effort: Effort) -> dict[str, object]:
    """Compare with DDP and with no overlap, where communication is half of a step without overlap."""
    over_ddp, gained = dict[str, float](), dict[str, float]()
    for name in LARGE:
        overlapped, after, rate = beside_ddp(name, 2 if effort.is_quick else 6)
        over_ddp[name] = round(overlapped.over_ddp, 3)
        gained[name] = round(overlapped.over_ddp / after.over_ddp, 3)
        effort.say(
            f"{name} at {rate / 1e6:.0f} MB/s: a step of {overlapped.step_s:.2f} s, exchanged after the pass "
            f"{after.step_s:.2f} s; {over_ddp[name]} of DDP's samples a second, {gained[name]} of those without overlap"
        )
    return {"over_ddp_on_slow_wire": over_ddp, "overlap_on_slow_wire": gained}


def tutorials_s(effort: Effort) -> dict[str, object]:
    return {"tutorials_s": {name: round(seconds_of(name, effort.say), 1) for name in TUTORIALS}}


FIGURES: dict[str, Measure] = {
    "step_vs_plain": step_vs_plain,
    "peak_memory_vs_plain": peak_memory_vs_plain,
    "hf_equal": hf_equal,
    "hf_loss_apart": hf_equal,
    "one_hash": one_hash,
    "key_step_vs_plain": key_step_vs_plain,
    "key_peak_vs_plain": key_peak_vs_plain,
    "key_one_hash": key_one_hash,
    "chunked_loss_peak": in_chunks,
    "chunked_loss_time": in_chunks,
    "over_ddp_on_slow_wire": on_slow_wire,
    "overlap_on_slow_wire": on_slow_wire,
    "tutorials_s": tutorials_s,
}


def _throughput(effort: Effort, name: str, key: Keys) -> float:
    num_turns = 6 if effort.is_quick else 20
    found = float(in_process(throughput, name, num_turns, STEPS_A_TURN, key))
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


def _has_one_hash(effort: Effort, name: str, worlds: Iterable[int], key: Keys) -> bool:
    arguments = [word for key_name, value in key.items() for word in (f"--{key_name}", str(value))]
    found = hashes_of(name, tuple(worlds), arguments)
    effort.say(f"{_called(name, key)}: " + ", ".join(f"{world} {digest[:12]}" for world, digest in found.items()))
    return len(set(found.values())) == 1


def _by_key(measure: Callable[[str, Keys], object]) -> dict[str, object]:
    return {f"{key}_{name}": measure(name, KEYS[key]) for key in KEYS for name in JOBS}


def _called(name: str, key: Keys) -> str:
    return " ".join([name, *(f"{key_name}={value}" for key_name, value in key.items())])


if __name__ == "__main__":
    measure_chosen("benchmarks.models", __doc__, FIGURES)
