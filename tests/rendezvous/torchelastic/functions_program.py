"""A user's program that runs its functions with torch's launcher; arguments: FUNCTION ENDPOINT RUN_ID FOLDER.

The processes of a job import it before their function begins; all but the first wait here for a file.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def await_gate(folder: Path) -> None:
    """Return in the first process that asks, and in others once a file of the name `gate` is there."""
    try:
        (folder / "first").mkdir()
    except FileExistsError:
        while not (folder / "gate").exists():
            time.sleep(0.01)


if __name__ == "__mp_main__":
    await_gate(Path(sys.argv[-1]))


def work(_: str) -> int:
    return int(os.environ["RANK"])


def work_without_end(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (Path(folder) / "log").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def collect() -> None:
    for _ in range(50):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    gc.collect()


def launch(function: Callable[[str], object], num_workers: int, endpoint: str, run_id: str, folder: str) -> object:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    conf = {"timeout": 240, "last_call_s": 0.1, "ttl": 240}
    named = {"run_id": run_id, "rdzv_backend": "etcd", "rdzv_endpoint": endpoint, "rdzv_configs": conf}
    config = LaunchConfig(1, 1, num_workers, **named, logs_specs=DefaultLogsSpecs(f"{folder}/torchelastic"))
    return elastic_launch(config, function)(folder)


def fork_after_a_job(*arguments: str) -> None:
    gc.disable()
    sys.stdout.write(f"{launch(work, 1, *arguments)}\n")
    sys.stdout.flush()
    child = multiprocessing.get_context("fork").Process(target=collect)
    child.start()
    child.join()
    sys.exit(child.exitcode)


def work_for_long(*arguments: str) -> None:
    launch(work_without_end, 2, *arguments)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
