"""Opening a session: form, claim, restore, bind, in this order; and checking a configuration without starting it.

Decisions that read the outside world (terms, commits) are taken by rank 0 and broadcast, its errors included, so that
all ranks go on alike or stop alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from elastic_train import errors
from elastic_train.checkpoint import CommitRecord, CommitWriter, Store, discover, load, open_store, sweep
from elastic_train.checkpoint.reader import read_record
from elastic_train.config import Config
from elastic_train.data.manifest import Manifest, load_manifest
from elastic_train.errors import ConfigError, DataError, ElasticTrainError
from elastic_train.fencing import Fence, JoinedFence, StoreFence, newest_term
from elastic_train.group import Group, connect
from elastic_train.feed import Feed
from elastic_train.history import History, last_applied
from elastic_train.lanes import owned_lanes
from elastic_train.mixing import derive
from elastic_train.order import Order
from elastic_train.preemption import LeaveRequest
from elastic_train.progress import Progress, ResumeBanner
from elastic_train.reduction import make_gradient_sum
from elastic_train.result import write_atomically
from elastic_train.session import Session
from elastic_train.state import AppliedState, build_state
from elastic_train.tasks.task import Task, load_task
from elastic_train.tracking import Tracker
from rendezvous.context import RendezvousContext, context, open_fence

T = TypeVar("T")
_INITIAL_WEIGHTS = 4  # separates the initial weights' random numbers from order and dropout


def open_session(config: Config, leave: LeaveRequest, started_at: float) -> Session:
    """Form the group, claim the term, restore the newest valid commit, bind the gradients."""
    launched = context()
    set_up_process(config)
    check_lanes(config, int(os.environ.get("WORLD_SIZE", "1")))
    device = pick_device(config)
    # Whatever can be refused is refused here, before a term is claimed or a peer waits.
    task = load_task(config.task)
    manifest, order = load_data(config, task)
    total_steps = config.max_steps or config.epochs * order.num_steps(config.batch.micro_batch)
    state = build_model(config, task, total_steps, device)
    feed = Feed(config, task, manifest)

    group = connect(_meeting_place(launched), config.peer_timeout_s, device)
    store = open_store(config.checkpoint_url)
    # Rank 0 alone speaks to etcd: the fence guards what is published, and nobody else publishes.
    fence: Fence = JoinedFence(store, open_fence(launched)) if launched and group.rank == 0 else StoreFence(store)
    term = claim_term(group, store, fence, launched)
    history = History(config.run.dir, term, group.rank)
    history.form(
        world=group.size,
        cause=launched.cause if launched else "start",
        joined_at=launched.joined_at if launched else None,
        sealed_at=launched.sealed_at if launched else None,
        started_at=started_at,
    )
    formed_at = time.time()
    progress = Progress() if group.rank == 0 else None
    if group.rank == 0:
        sweep(store, term)
    head = restore(config, group, store, fence, state, manifest, history, progress, launched, formed_at)
    parameters = list(state.model.parameters())
    session = Session(
        config=config,
        task=task,
        model=state.model,
        state=state,
        order=order,
        group=group,
        gradients=make_gradient_sum(config.reduction, parameters, group, config.batch.num_lanes),
        lanes=owned_lanes(group.rank, group.size, config.batch.num_lanes),
        total_steps=total_steps,
        device=device,
        term=term,
        leave=leave,
        history=history,
        progress=progress,
        tracker=start_tracker(config, group, term),
        store=store,
        commits=CommitWriter(store, fence, term, head),
        manifest=manifest,
        feed=feed,
        head=head,
    )
    session.tell(
        f"term {term}: {group.size} ranks, {config.batch.num_lanes} lanes, {total_steps} steps in all, {device}"
    )
    return session


def _meeting_place(launched: RendezvousContext | None) -> str:
    """Return a name that no earlier world of this job has used at the same store."""
    if launched is not None:
        return f"term-{launched.term}"
    return f"round-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def restore(
    config: Config,
    group: Group,
    store: Store,
    fence: Fence,
    state: AppliedState,
    manifest: Manifest,
    history: History,
    progress: Progress | None,
    launched: RendezvousContext | None,
    formed_at: float,
) -> CommitRecord | None:
    """Read the newest valid commit into the state, on every rank; return it, None at the beginning of a run."""
    started = time.perf_counter()
    key, skipped = agree(group, lambda: _find_head(store, fence))
    head = read_record(store, key) if key else None
    if head is not None:
        check_continues(config, manifest, head)
        state.restore(lambda tensors: load(store, head, tensors), head.step, head.cursor, head.coverage)
    seconds = time.perf_counter() - started
    last = last_applied(config.run.dir, before_term=history.term) if group.rank == 0 else None
    lost = max(0, last.step - state.step) if last else None
    history.restore(
        step=state.step,
        epoch=state.cursor.epoch,
        offset=state.cursor.offset,
        commit=key,
        seconds=seconds,
        skipped=skipped,
        lost_steps=lost,
    )
    if progress is not None and head is not None:
        joined_at = launched.joined_at if launched else None
        progress.banner(
            ResumeBanner(
                commit=head.key,
                step=head.step,
                age_s=time.time() - head.created_at,
                steps_lost=lost,
                world_before=last.world if last else None,
                world_after=group.size,
                term_before=last.term if last else None,
                term_after=history.term,
                detect_s=max(0.0, joined_at - last.at) if last and joined_at else None,
                form_s=formed_at - joined_at if joined_at else None,
                restore_s=seconds,
                skipped=tuple((key, why) for key, why in skipped),
            )
        )
    return head


def _find_head(store: Store, fence: Fence) -> tuple[str | None, list[tuple[str, str]]]:
    claimed = fence.head()
    found = discover(store, published=claimed.commit if claimed else None)
    return (found.head.key if found.head else None), list(found.skipped)


def start_tracker(config: Config, group: Group, term: int) -> Tracker | None:
    """Start the tracker on rank 0, and keep the resolved configuration beside the commits."""
    if group.rank != 0:
        return None
    folder = Path(config.run.dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", config.to_yaml())
    return Tracker.start(
        run_dir=folder,
        term=term,
        config=config.model_dump(mode="json"),
        mlflow_uri=config.tracking.mlflow_uri,
        experiment=config.tracking.experiment,
        run_name=config.run_name,
    )


def set_up_process(config: Config) -> None:
    """Make kernels repeatable: one thread count in all worlds, deterministic algorithms unless rounding may vary."""
    torch.set_num_threads(config.threads_per_rank)
    if config.reduction == "canonical":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # costs time, and nothing here reads such memory
        torch.backends.cudnn.benchmark = False


def check_lanes(config: Config, world_size: int) -> None:
    """Refuse a world with more ranks than lanes."""
    if world_size > config.batch.num_lanes:
        raise ConfigError(
            f"{world_size} ranks, but only {config.batch.num_lanes} lanes (batch.global_batch {config.batch.global_batch}"
            f" / batch.micro_batch {config.batch.micro_batch}): start fewer ranks, or make batch.micro_batch smaller"
        )


def agree(group: Group, decide: Callable[[], T]) -> T:
    """Let rank 0 decide and tell the others; if it fails, every rank raises an error of the same kind.

    What `decide` returns must be made of JSON's types (a tuple arrives as a list).
    """
    if group.rank == 0:
        try:
            value = decide()
        except ElasticTrainError as error:
            group.broadcast_object({"error": _public_name(error), "message": str(error)}, 0)
            raise
        group.broadcast_object({"value": value}, 0)
        return value
    answer = group.broadcast_object(None, 0)
    assert isinstance(answer, dict), "rank 0 sends a value or an error"
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]  # type: ignore[no-any-return]


def _public_name(error: ElasticTrainError) -> str:
    """Return the name of the nearest class that errors.py has; rooms have finer ones of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if hasattr(errors, kind.__name__))


def claim_term(group: Group, store: Store, fence: Fence, rendezvous: RendezvousContext | None) -> int:
    """Claim a term above every one that the rendezvous or the store has seen; fence first, then restore."""
    at_least = rendezvous.term if rendezvous else 1
    return agree(group, lambda: fence.claim(max(at_least, newest_term(store) + 1)))


def load_data(config: Config, task: Task) -> tuple[Manifest, Order]:
    """Load the training set's manifest, fit the task to it, and lay out the order."""
    manifest = load_manifest(config.data.train)
    task.prepare(manifest)
    order = Order(
        manifest.group_rows,
        num_lanes=config.batch.num_lanes,
        seed=config.run.seed,
        block_row_groups=config.data.block_row_groups,
    )
    return manifest, order


def build_model(config: Config, task: Task, total_steps: int, device: torch.device) -> AppliedState:
    """Build model and optimizer from the run's seed, so that every rank begins with the same bits."""
    torch.manual_seed(derive(config.run.seed, _INITIAL_WEIGHTS) >> 1)
    model = task.build_model().to(device)
    model.train()
    return build_state(model, config.optimizer, total_steps, device.type, config.precision == "fp16")


def pick_device(config: Config) -> torch.device:
    """Return this rank's device: its own GPU where the node has GPUs and the configuration allows."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device: cuda is asked for, but this node has no GPU that torch can use")
    if not has_gpu or config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def check_continues(config: Config, manifest: Manifest, record: CommitRecord) -> None:
    """Refuse to go on from a commit whose order or data are not this configuration's."""
    if record.manifest_digest != manifest.digest:
        raise DataError(
            f"{manifest.url}: the manifest changed since commit {record.key} (digest {manifest.digest[:12]}, then "
            f"{record.manifest_digest[:12]}): restore the data it was trained on, or start anew in another run.dir"
        )
    if record.config_digest != config.identity():
        raise ConfigError(
            f"run.dir {config.run.dir} holds commits of another configuration (commit {record.key}): run.seed, task, "
            "batch and data.block_row_groups must stay as they were; start anew in another run.dir to change them"
        )
