"""This machine by itself: Python and torch, its GPUs, and the limits that the system sets to a process."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elastic_train.health.result import Finding, fail, ok, warn
from elastic_train.system.extras import version_of
from elastic_train.system.wording import counted, size
from rendezvous.open_files import BESIDES, PER_RANK, raise_limit

RANKS_TO_EXPECT = 1024
"""For a world of so many there should be room; jobs are seldom larger."""
LEAST_SHM, LEAST_TEMP, LEAST_MEMLOCK = 256 << 20, 256 << 20, 1 << 30
FILLING_S = 1.0
"""Maximum seconds for filling the tested memory of each device."""
SHM, INFINIBAND = Path("/dev/shm"), Path("/sys/class/infiniband")


def examine_torch() -> Iterator[Finding]:
    """Say which Python and torch are here, and whether torch can train with others."""
    yield ok("python", f"{platform.python_version()} on {platform.platform()}, {counted(os.cpu_count() or 1, 'CPU')}")
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a library that it needs is missing
        yield fail("torch", f"cannot be imported: {error}", "install torch 2.9 or newer for this Python and system")
        return
    ours = version_of("elastic-train") or "from a folder of sources"
    if dist.is_available() and dist.is_gloo_available():
        yield ok("torch", f"{torch.__version__}; elastic-train {ours}")
    else:
        yield fail("torch", f"{torch.__version__} has no gloo", "install a build of torch with torch.distributed")


def examine_gpus(num_seen: int) -> Iterator[Finding]:
    """Say whether torch computes on the GPUs that the driver sees, `num_seen` of them."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError):
        return  # which `examine_torch` says
    from elastic_train.parallel.devices.device import nccl_hazard

    num_usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_seen > num_usable:
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        yield fail(
            "gpu",
            f"the driver has {counted(num_seen, 'GPU')}, torch uses {num_usable}: it {built}",
            "install the build of torch for this driver (nvidia-smi names the newest CUDA that it knows)",
        )
    if not num_usable:
        if not num_seen:
            yield ok("gpu", "none: ranks compute on the CPU")
        return
    names = sorted({torch.cuda.get_device_name(i) for i in range(num_usable)})
    if len(names) > 1:
        yield warn("gpu", f"of several models: {', '.join(names)}", "bits agree between ranks of one model only")
    yield ok("gpu", f"{num_usable} × {', '.join(names)}")
    if dist.is_nccl_available():
        yield ok("nccl", ".".join(str(part) for part in torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        if (hazard := nccl_hazard()) is not None:
            yield warn("nccl", *hazard.split(". ", 1))
    else:
        yield fail("nccl", "torch is built without it", "install a build of torch with NCCL, or set transport: gloo")


def examine_computing() -> Iterator[Finding]:
    """Say whether each core and GPU computes, and their memory keeps, what it has to: a worker's health check."""
    try:
        import torch
    except (ImportError, OSError):
        return  # which `examine_torch` says
    torch.set_num_threads(1)  # or it would be the system that chooses among the cores

    from elastic_train.health.examinations import MOST, examine_memory, examine_products, own_cores, room

    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    for device in (torch.device("cpu"), *gpus):
        yield from examine_products(device, tuple(MOST), own_cores())
        yield from examine_memory(device, room(device, 1), FILLING_S)


def examine_limits() -> Iterator[Finding]:
    """Say what this process may have of the system: open files, shared memory, locked memory, temporary files."""
    files, needed = raise_limit(), PER_RANK * RANKS_TO_EXPECT + BESIDES
    if files < needed:
        yield warn(
            "open files",
            f"at most {files}, enough for a world of {max(0, files - BESIDES) // PER_RANK} ranks",
            "raise the hard limit (ulimit -Hn, LimitNOFILE of a systemd unit, --ulimit nofile of a container)",
        )
    else:
        yield ok("open files", f"at most {files}")
    yield from _room(
        "shared memory", SHM, LEAST_SHM, "--shm-size of a container; an emptyDir of medium Memory on /dev/shm of a pod"
    )
    yield from _room("temporary files", Path(tempfile.gettempdir()), LEAST_TEMP, "free some, or set TMPDIR")
    yield _locked_memory()


def _room(check: str, folder: Path, least: int, remedy: str) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield fail(check, f"{folder}: {error.strerror}", remedy)
        return
    if not os.access(folder, os.W_OK):
        yield fail(check, f"{folder} cannot be written", remedy)
    elif free < least:
        yield warn(check, f"{size(free)} free in {folder}, less than {size(least)}", remedy)
    else:
        yield ok(check, f"{size(free)} free in {folder}")


def _locked_memory() -> Finding:
    """Judge how much memory may be locked, of which InfiniBand needs much."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    said = "no limit" if limit == resource.RLIM_INFINITY else f"at most {size(limit)}"
    has_infiniband = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if has_infiniband and limit != resource.RLIM_INFINITY and limit < LEAST_MEMLOCK:
        return warn(
            "locked memory", f"{said}, and NCCL locks its buffers for InfiniBand", "ulimit -l unlimited (LimitMEMLOCK)"
        )
    return ok("locked memory", said if has_infiniband else f"{said}; no InfiniBand here")
