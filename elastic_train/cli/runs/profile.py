"""`elastic-train profile`: traces of a run, merged for Perfetto, and the traffic between its ranks; or take them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_train.cli.output import cell, narrow_table, print_json, print_text
from elastic_train.config import sources
from elastic_train.errors import ConfigError
from elastic_train.planning.arithmetic.catalogue import Cluster, Link, parse_cluster
from elastic_train.runs.traces import Merged, merge_all, rows_of
from elastic_train.system.wording import size

_HEAD = ("operation", "size", "calls", "bytes", "time", "bandwidth")


def profile(
    run: str,
    overrides: Sequence[str],
    *,
    at: int,
    steps: int,
    ranks: int,
    out: str | None,
    on: str | None,
    is_json: bool,
) -> int:
    """Merge the traces of a run; of a configuration, train a few steps first. Returns the exit code.

    `on` is the cluster, as `plan --on` names it, with whose links bandwidths are compared.
    """
    cluster = None if on is None else parse_cluster(on)
    if Path(run).is_file():
        run = _train(Path(run), overrides, at=at, steps=steps, ranks=ranks, out=out)
    elif overrides:
        raise ConfigError(f"{run} is not a configuration: keys such as {overrides[0]} follow one only")
    merged = merge_all(run)
    if is_json:
        return print_json([_as_json(each, cluster) for each in merged])
    for each in merged:
        _show(each, cluster)
    return print_text("open a file at https://ui.perfetto.dev: it reads it in the browser, nothing is sent")


def _train(config: Path, overrides: Sequence[str], *, at: int, steps: int, ranks: int, out: str | None) -> str:
    """Train as many steps as it takes, in a folder of its own; return that."""
    small = {"at": at, "steps": steps, "ranks": ranks}
    if wrong := [f"--{name} must be at least 1, not {value}" for name, value in small.items() if value < 1]:
        raise ConfigError(*wrong)
    resolved = sources.load(config, environ=os.environ, arguments=overrides)  # all that is wrong is said before
    folder = out or f"{resolved.run.dir.rstrip('/')}-profile"
    if Path(folder).exists():
        raise ConfigError(f"{folder} exists: steps are traced in a new folder; delete it, or name another with --out")
    changes = {
        "run.dir": folder,
        "max-steps": str(at + steps - 1),
        "profile.at-steps": f"{[*range(at, at + steps)]}",
        "profile.ranks": "all",
        "checkpoint.url": "null",
        "validation.every": "null",
        "tracking.mlflow-uri": "null",
    }
    launcher = (
        ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else list[str]()
    )
    settings = [part for key, value in changes.items() for part in (f"--{key}", value)]
    command = [sys.executable, "-m", *launcher, "elastic_train", str(config), *overrides, *settings]
    environ = {**os.environ, "OMP_NUM_THREADS": str(resolved.threads_per_rank)}
    done = subprocess.run(command, env=environ, stdout=sys.stderr, check=False)
    if done.returncode:
        raise ConfigError(f"{config} could not be trained for {at + steps - 1} steps (exit code {done.returncode})")
    return folder


def _link_of(merged: Merged, cluster: Cluster) -> tuple[Link, float]:
    """Return the link that the traced ranks exchange over, and what a rank can send by it, in bytes a second."""
    if len(merged.offsets_ms) > 1:
        return cluster.between, cluster.between_bytes_per_s
    return cluster.inside, cluster.inside.bytes_per_s


def _as_json(merged: Merged, cluster: Cluster | None) -> dict[str, object]:
    found = merged.as_json()
    if cluster is None:
        return found
    link, peak = _link_of(merged, cluster)
    traffic: list[dict[str, object]] = found["traffic"]  # type: ignore[assignment]
    for row, one in zip(traffic, merged.traffic, strict=True):
        row["of_link"] = one.share_of(peak)
    return {**found, "link": link.name, "link_bytes_per_s": peak}


def _show(merged: Merged, cluster: Cluster | None) -> None:
    from rich.console import Console

    ranks = ", ".join(map(str, merged.ranks))
    print_text(f"from step {merged.step}, term {merged.term}, ranks {ranks}: {merged.path}")
    ahead = {host: ms for host, ms in merged.offsets_ms.items() if ms}
    for host, ms in ahead.items():
        print_text(
            f"the clock of {host} is {ms:+.3f} ms off the first rank's; taken out, up to {merged.spread_ms:.3f} ms"
        )
    if merged.num_left_out:
        print_text(f"{merged.num_left_out} operations came after the most that are noted, and are missing")
    rows: list[tuple[str, ...]] = rows_of(merged.traffic)
    head: tuple[str, ...] = _HEAD
    if cluster is not None:
        link, peak = _link_of(merged, cluster)
        shares = [one.share_of(peak) for one in merged.traffic]
        head = (*_HEAD, f"of {link.name}, {size(peak)}/s")
        rows = [(*row, cell(share and f"{share:.0%}")) for row, share in zip(rows, shares, strict=True)]
    table = narrow_table(*head)
    for row in rows:
        table.add_row(*row)
    if merged.traffic:
        Console(markup=False).print(table)
    else:
        print_text("one rank, and no traffic")
