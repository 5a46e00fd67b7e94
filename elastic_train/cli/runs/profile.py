"""`elastic-train profile`: traces of a run, merged for Perfetto, and the traffic between its ranks."""

from __future__ import annotations

from elastic_train.cli.output import Json, print_json, print_table, print_text
from elastic_train.runs.traces import Merged, merge_all, rows_of

_HEAD = ("operation", "size", "calls", "bytes", "time", "bandwidth")


def profile(run: str, *, json_: Json = False) -> int:
    """Merge the traces of RUN's ranks into one for Perfetto.

    It also prints what the ranks exchanged, by kind and size. RUN is a folder in which `profile.at_steps` had traces
    taken.
    """
    merged = merge_all(run)
    if json_:
        return print_json([each.as_json() for each in merged])
    for each in merged:
        _show(each)
    return print_text("open a file at https://ui.perfetto.dev: it reads it in the browser, nothing is sent")


def _show(merged: Merged) -> None:
    ranks = ", ".join(map(str, merged.ranks))
    print_text(f"from step {merged.step}, term {merged.term}, ranks {ranks}: {merged.path}")
    ahead = {host: ms for host, ms in merged.offsets_ms.items() if ms}
    for host, ms in ahead.items():
        print_text(
            f"the clock of {host} is {ms:+.3f} ms off the first rank's; taken out, up to {merged.spread_ms:.3f} ms"
        )
    if merged.num_left_out:
        print_text(f"{merged.num_left_out} operations came after the most that are noted, and are missing")
    if merged.traffic:
        print_table(_HEAD, rows_of(merged.traffic))
    else:
        print_text("one rank, and no traffic")
