"""Run a user's command with a scenario's faults and without, and have both runs judged.

The same executor as for our own runs drives the job; `watch` writes its histories in our format.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.errors import RunError, ScenarioError
from chaos.judge.verdict import (
    FAULTED,
    REFERENCE,
    Verdict,
    examine,
)
from chaos.real.job import Job
from chaos.real.runs import clear, undoable
from chaos.scenario.kinds import BY_TASKS, KINDS, PROXIED
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due, schedule
from chaos.script.nodes import check, nodes_of, uses_etcd
from chaos.script.watch import Watcher
from chaos.services.surroundings import surroundings

DEFAULT = "any-script"
"""The scenario of a command without one."""

Say = Callable[[str], None]


def execute(command: str, scenario: Scenario, seed: int, folder: Path, *, replay: str, say: Say) -> Verdict:
    """Run a command with the scenario's faults and, separately, without; write and return the verdict.

    A job that does not finish is a finding, not an error, as it is the user's. Raises ScenarioError for an unusable
    command or scenario.
    """
    check(command)
    due = _settle(scenario, seed, uses_etcd(command))
    say(f"scenario {scenario.name}, {scenario.nodes.count} nodes: {', '.join(f'{f.kind} {f.target}' for f in due)}")
    clear(folder)
    for name in [FAULTED, REFERENCE] if scenario.reference else [FAULTED]:
        say(f"{'with' if name == FAULTED else 'the same without'} faults, in {folder / name}")
        _run_once(command, scenario, due if name == FAULTED else [], seed, folder / name, replay, say)
    return examine(folder)


def _settle(scenario: Scenario, seed: int, has_etcd: bool) -> list[Due]:
    problems = [*(_unfit(fault.kind, has_etcd) for fault in scenario.faults), *undoable(scenario)]
    if scenario.soak is not None:
        problems.append("a soak is for our own trainer: list the faults of a script")
    if scenario.own_data:
        problems.append("own_data is for our own trainer: what a script reads is not known")
    if any(fault.within for fault in scenario.faults):
        problems.append("how long a script runs is not known: say at_step or after_s, not within")
    if found := [problem for problem in problems if problem is not None]:
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in found))
    return schedule(scenario, seed, total_steps=sys.maxsize, commit_every=sys.maxsize)


def _unfit(kind: str, has_etcd: bool) -> str | None:
    """Return why a kind of fault cannot be applied to a user's script; None if it can."""
    if kind in BY_TASKS:
        return f"{kind} is for our own trainer: a task of chaos.tasks does it"
    if KINDS[kind].aim in ("point", "storage", "tracker", "data") or kind in ("start_twin", "readonly_dir"):
        known = "no failpoints, commits, tracker, data or second launch that we know"
        return f"{kind} is for our own trainer: a script has {known}"
    if (KINDS[kind].aim == "etcd" or kind in PROXIED or kind == "lose_lease") and not has_etcd:
        return f"{kind} needs etcd: put --rdzv-backend=etcd into the command, without an endpoint"
    return None


def _run_once(
    command: str, scenario: Scenario, due: Sequence[Due], seed: int, folder: Path, replay: str, say: Say
) -> None:
    run_id, kinds = f"{scenario.name}-{folder.name}", [fault.kind for fault in due]
    folder.mkdir(parents=True)
    with surroundings(folder, run_id, kinds, scenario) as around:
        if absent := [f"{kind} cannot be done here: {why}" for kind, why in around.missing.items() if kind in kinds]:
            raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in absent))
        nodes = nodes_of(command, scenario.nodes, folder, run_id, around)
        watcher = Watcher(folder, nodes, command)
        try:
            Job(folder, nodes, scenario, list(due), seed, watcher.look, say, replay, around).run()
        except RunError as error:
            say(f"{folder.name}: {error}")
        finally:
            watcher.finish()
