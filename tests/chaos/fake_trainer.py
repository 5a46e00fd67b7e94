"""A fake of torchrun and the trainer: it writes a history, and has a worker in a separate session, like torchrun.

python fake_trainer.py FOLDER NUM_STEPS [EXIT_CODE]; -1 steps for a job that never begins. With a file `is-held` in the
folder a job continues beyond its last step until the file is removed.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

COMMIT_EVERY = 12
HELD = "is-held"


def main(folder: Path, num_steps: int, code: int) -> int:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(f"worker {worker.pid}", flush=True)  # noqa: T201 - the node's log
    if num_steps < 0:
        time.sleep(600)
    (folder / "history").mkdir(exist_ok=True)
    with (folder / "history" / f"00000001-00000-{os.getpid()}.jsonl").open("a", buffering=1) as file:

        def write(op: str, **fields: object) -> None:
            file.write(json.dumps({"op": op, "t": time.time(), "term": 1, "rank": 0, **fields}) + "\n")

        write("form", world=1, pid=worker.pid)
        write("restore", step=0, resumed=None)
        for step in itertools.count(1):
            if step > num_steps and not (folder / HELD).exists():
                break
            time.sleep(0.01)
            write("step", step=step, epoch=0, num_samples=8, world=1, loss=0.5)
            if step % COMMIT_EVERY == 0:
                write("commit", step=step)
    worker.kill()
    worker.wait()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0))
