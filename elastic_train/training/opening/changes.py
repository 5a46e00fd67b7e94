"""Report once, before a run's first step, what has changed since its last start: keys, code and libraries."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping

import torch

from elastic_train.checkpoint import CommitRecord
from elastic_train.checkpoint.commits.record import is_exhausted
from elastic_train.job.plan import Plan
from elastic_train.job.plan_facts import config_of, describe_changes
from elastic_train.system.extras import version_of
from elastic_train.tasks.task_source import source_files
from elastic_train.training.session import Process
from elastic_train.world.uniformity import OWN, OWN_SECTIONS, own_sources
from elastic_train.world.world import World

SOURCE = "source of "
"""Prefix of the digests of the task's modules in a commit's versions."""
_OF_RECIPE = ("optimizer", "compile", "epochs", "max_steps")
_SAID = "what has changed"
VALIDATION = "the validation set"
"""Name of the validation set's digest in a commit's versions."""
_OF_BITS = ("precision", "reduction", "threads_per_rank", "device")
LIBRARIES = ("numpy", "pyarrow", "transformers", "tokenizers", "peft", "pillow", "torchvision")


def versions_of(plan: Plan) -> dict[str, str]:
    """Return, for commits, the digests of the task's modules and of the validation set, and versions of libraries."""
    digests = dict(line.rsplit(" ", 1) for line in own_sources(plan))
    found = {f"{SOURCE}{name}": digest for name, digest in digests.items()}
    if (digest := plan.feed.validation_digest) is not None:
        found[VALIDATION] = digest
    return found | _libraries()


@functools.cache
def _libraries() -> dict[str, str]:
    return {name: version for name in LIBRARIES if (version := version_of(name)) is not None}


def say_changes(process: Process, world: World, head: CommitRecord | None, versions: Mapping[str, str]) -> None:
    """Announce, once per process, the changes since the commit that the run continues from."""
    is_said = _SAID in process.warned
    process.warned.add(_SAID)
    if is_said or head is None or not world.is_leader:
        return
    plan = process.plan
    lines = _of_length(process, head), _of_keys(plan, head), _of_validation(plan, head), _of_code(plan, head, versions)
    for line in itertools.chain(*lines):
        world.announce(line)


def _of_length(process: Process, head: CommitRecord) -> Iterator[str]:
    """Yield a line if the run is already finished."""
    step, total = process.state.step, process.plan.total_steps
    stopping, improvement = process.plan.config.validation.early_stopping, process.state.reached.improvement
    if step < total and is_exhausted(stopping, improvement):
        yield (
            f"Early stopping has ended this run after step {step} of {total} ({head.key}): raise "
            "validation.early_stopping.patience, or set early_stopping to null, to train more"
        )
    if step == total:
        yield f"All {total} steps are applied already ({head.key}): raise epochs or max_steps to train more"


def _of_keys(plan: Plan, head: CommitRecord) -> Iterator[str]:
    """Yield a line with the keys that differ from the last start, except those without effect on the computation.

    Changes of the recipe, which is in the commit, are reported by the state.
    """
    changed = describe_changes(plan.config, config_of(plan.config, head.term))
    ours = [line for line in changed if not _is_own(line.partition(" ")[0])]
    if ours:
        may_round = any(line.partition(" ")[0] in _OF_BITS for line in ours)
        effect = "; bits of the weights may differ from here on" if may_round else ""
        yield f"The configuration has changed since the last start: {'; '.join(ours)}{effect}"


def _of_validation(plan: Plan, head: CommitRecord) -> Iterator[str]:
    """Yield a warning if the validation rows differ from those of the commit, whatever their path."""
    before, now = head.versions.get(VALIDATION), plan.feed.validation_digest
    if before is not None and now is not None and before != now:
        yield (
            f"WARNING: the validation set {plan.config.data.validation} is not the one of {head.key} (digest "
            f"{now[:12]}, then {before[:12]}): earlier values, as of checkpoint.keep_best and early stopping, are of "
            "other rows. Restore that set, or start again in another run.dir, to compare them"
        )


def _is_own(key: str) -> bool:
    section = key.partition(".")[0]
    return key in OWN or section in OWN_SECTIONS or section in _OF_RECIPE or section == "checkpoint"


def _of_code(plan: Plan, head: CommitRecord, versions: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for changed files and libraries; commits of older releases do not record them."""
    before = head.versions
    files = {SOURCE + name: path for name, path in source_files(type(plan.task)).items()}
    sources = {name for name in {**before, **versions} if name.startswith(SOURCE)}
    knows = any(name in before for name in sources)
    changed = sorted(name for name in sources if knows and before.get(name) != versions.get(name))
    if changed:
        named = ", ".join(str(files.get(name, name.removeprefix(SOURCE))) for name in changed)
        yield (
            f"WARNING: code has changed since {head.key}: {named}. The steps before {head.step} were computed by the "
            "earlier code: if it computes something else now, start again in another run.dir"
        )
    now = {"torch": torch.__version__, **versions}
    libraries = [name for name in ("torch", *LIBRARIES) if name in before and before[name] != now.get(name)]
    if libraries:
        what = ", ".join(f"{name} {before[name]}, now {now.get(name, 'none')}" for name in libraries)
        yield f"Libraries have changed since {head.key} ({what}): bits may differ from here on"
