"""A fake of torchrun and a script with the hook, without torch: all ranks are restarted when one dies.

python fake_torchrun.py DIR HISTORY RANKS [--silent]; 3 epochs of 16 steps of 8 rows, a snapshot every 10 steps. The
first world waits at step 30 for a fault, unless it runs in the reference's folder. --silent: no hook.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from chaos.hook import log_ids

ROWS, BATCH, EPOCHS, EVERY, HELD_AT = 128, 8, 3, 10, 30
STEPS = EPOCHS * ROWS // BATCH


def agent(folder: Path, history: Path, ranks: int) -> int:
    """Start all ranks, and start all again when one dies."""
    for turn in range(10):
        given = {"TURN": str(turn), "WORLD_SIZE": str(ranks)}
        workers = [_start({**given, "RANK": str(rank)}) for rank in range(ranks)]
        while all(worker.poll() is None for worker in workers):
            time.sleep(0.01)
        if any(worker.poll() not in (None, 0) for worker in workers):
            for worker in workers:
                worker.kill()
                worker.wait()
            continue
        return max(worker.wait() for worker in workers)
    return 1


def _start(given: dict[str, str]) -> subprocess.Popen[bytes]:
    everywhere = {"TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "here"}
    return subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, **everywhere, **given})


def train(folder: Path, history: Path, is_silent: bool) -> None:
    """Apply every row of every epoch once, from the step at which the last world stopped."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    snapshot, is_held = folder / "snapshot", os.environ["TURN"] == "0" and history.parent.name == "faulted"
    _wait(lambda: any(history.glob(f"*-{os.getpid()}.jsonl")))  # until the watcher has seen it, and may kill it
    done = int(snapshot.read_text()) if snapshot.exists() else 0
    for step in range(done + 1, STEPS + 1):
        epoch, place = divmod(step - 1, ROWS // BATCH)
        rows = [row * 5 % ROWS for row in range(place * BATCH, (place + 1) * BATCH)][rank::ranks]
        if not is_silent:
            log_ids(rows, step=step, epoch=epoch, of=ROWS, loss=1 / step)
        if step % EVERY == 0:
            mark = f"reached-{os.environ['TURN']}-{step}"  # of this world: all have read the snapshot that is replaced
            (folder / f"{mark}-{rank}").touch()
            _wait(lambda mark=mark: all((folder / f"{mark}-{rank}").exists() for rank in range(ranks)))  # type: ignore[misc]
            if rank == 0:
                (folder / "unfinished").write_text(str(step))
                (folder / "unfinished").rename(snapshot)
        if is_held and step == HELD_AT - 1:
            _wait(lambda: False)


def _wait(is_over) -> None:  # type: ignore[no-untyped-def]
    while not is_over():
        time.sleep(0.01)


if __name__ == "__main__":
    own, history = Path(sys.argv[1]), Path(sys.argv[2]).resolve()
    if "RANK" in os.environ:
        train(own, history, "--silent" in sys.argv)
    else:
        sys.exit(agent(own, history, int(sys.argv[3])))
