"""Steps compared with those of whole state: memory, time, bytes sent, and partial sums."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from functools import wraps

from benchmarks.figures import Effort
from benchmarks.ranks import Meeting, run
from benchmarks.sharding.jobs import MODES, SMALL, Job, Mode, live_bytes
from elastic_train.core.lanes import Counter, Part

WORLDS = ((2, 1), (2, 2), (4, 1), (4, 2))
NUM_LANES = (8, 12, 16)


def beside_whole(effort: Effort) -> dict[str, object]:
    """Return memory, time and bytes of a step relative to whole state."""
    live, slower, sent = dict[str, float](), dict[str, float](), dict[str, float]()
    for shards, (size, copies) in itertools.product(MODES, WORLDS):
        name, found = f"{shards}_w{size}_c{copies}", run(_beside, size, shards, copies, 6 if effort.is_quick else 24)
        slower[name] = round(statistics.median(one["ratio"] for one in found), 3)
        effort.say(f"{name}: {slower[name]} of the time of a step with whole state")
        if size == 4:
            live[name] = round(max(one["live"] for one in found), 3)
            sent[name] = round(statistics.mean(one["sent"] for one in found), 3)
    return {"live_ratio": live, "step_vs_replicated": slower, "sent_vs_all_reduce": sent}


def _beside(meeting: Meeting, shards: Mode, copies: int, rounds: int) -> dict[str, float]:
    """Time steps of whole and of sharded state in turn; count the bytes that a rank holds and sends in a step."""
    group, sharded = meeting.group, Job(meeting.group, SMALL, shards, copies)
    sharded.step()
    live = live_bytes() / 16 / sharded.num_parameters
    whole = Job(group, SMALL, "none")
    whole.step()
    ours, theirs = (
        statistics.median(s for s, _ in side) for side in meeting.in_turn([sharded.step, whole.step], rounds)
    )
    before = group.num_bytes
    sharded.step()
    all_reduce = 2 * 4 * sharded.num_parameters * (group.size - 1) / group.size
    # Received bytes are counted as well; over all ranks, as much is received as sent.
    return {
        "ratio": ours / theirs,
        "live": live,
        "sent": (group.num_bytes - before) / 2 / all_reduce,
    }


def counters(effort: Effort) -> dict[str, object]:
    """Return the most partial sums that a rank had put aside after any push, by number of lanes."""
    most, sizes = dict[str, int](), (1, 3) if effort.is_quick else (1, 2, 3, 4)
    for num_lanes in NUM_LANES:
        cases = itertools.product(MODES[1:], sizes, (1, 2))
        found = [max(run(most_sums, size, shards, copies, num_lanes)) for shards, size, copies in cases]
        most[f"lanes_{num_lanes}"] = max(found)
        effort.say(f"{num_lanes} lanes: {max(found)} sums")
    return {"counter_chunks_max": most}


def most_sums(meeting: Meeting, shards: Mode, copies: int, num_lanes: int) -> int:
    """Take a step, and check every counter after each push."""
    push, most = Counter.push, 0

    @wraps(push)
    def observed(counter: Counter[object], part: Part, total: object) -> None:
        nonlocal most
        push(counter, part, total)
        most = max(most, len(counter.parts))

    Counter.push = observed  # type: ignore[method-assign, assignment]
    Job(meeting.group, replace(SMALL, num_lanes=num_lanes, micro_batch=1, num_tokens=16), shards, copies).step()
    assert most, "gradients that are in shards are added by counters"
    return most
