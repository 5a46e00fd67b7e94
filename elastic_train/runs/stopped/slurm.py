"""Ask Slurm what became of a job: it ends jobs at their time limit or for their memory, and starts others again."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from elastic_train.runs.stopped.advice import LESS_MEMORY, RESUME, Do

ANSWERS_WITHIN_S = 5.0
WAITS_S = 900.0
"""Seconds of silence of a running job in which it may wait for nodes: the default of --timeout-s."""
_TO_COME = ("PENDING", "REQUEUED", "REQUEUE_FED", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")
_HELD = ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED: dict[str, tuple[Do, str]] = {
    "TIMEOUT": ("start", f"{RESUME}; a longer --time, or --signal=USR1@120, leaves time to commit"),
    "DEADLINE": ("start", f"{RESUME}; its --deadline has passed"),
    "OUT_OF_MEMORY": ("fix", LESS_MEMORY),
    "NODE_FAIL": ("start", f"{RESUME}; sinfo -R says which node failed"),
    "BOOT_FAIL": ("start", f"{RESUME}; sinfo -R says which node failed"),
    "PREEMPTED": ("start", RESUME),
    "CANCELLED": ("start", RESUME),
}
_FIELD = re.compile(r"\b(JobState|Reason)=(\S+)")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job's state as Slurm names it, and its reason; `number` is its id."""

    number: str
    state: str
    reason: str = ""

    @property
    def is_held(self) -> bool:
        """True if Slurm will not start it before it is released."""
        return self.state in _HELD or (self.state == "PENDING" and self.reason.startswith("JobHeld"))


def ask_slurm(number: str) -> SlurmJob | None:
    """Return what Slurm knows of a job; None if it does not answer, or has forgotten it."""
    if answer := _answer("scontrol", "-o", "show", "job", number):
        found = dict(_FIELD.findall(answer.splitlines()[0]))
        if "JobState" in found:
            return SlurmJob(number, found["JobState"], found.get("Reason", ""))
    answer = _answer("sacct", "-n", "-X", "-P", "-j", number, "-o", "State,Reason")
    state, _, reason = answer.splitlines()[-1].partition("|") if answer else ("", "", "")
    return SlurmJob(number, state.split()[0].rstrip("+"), reason) if state else None  # CANCELLED by 1000


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=ANSWERS_WITHIN_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def by_slurm(job: SlurmJob, do: Do, sentence: str, silent_s: float) -> tuple[Do, str, str] | None:
    """Return remedy, sentence and advice if Slurm knows more than the run's folder, which says `do` and `sentence`."""
    why = f" ({job.reason})" if job.reason not in ("", "None") else ""
    known = f"Slurm has job {job.number} as {job.state}{why}"
    if do not in ("start", "nothing"):
        return None
    if job.is_held:
        return "start", f"{known}: it waits until it is released; {sentence}", f"scontrol release {job.number}"
    if job.state in _TO_COME:
        return "nothing", f"{known}, and will start it again; {sentence}", "wait"
    if job.state in ("RUNNING", "COMPLETING"):
        waiting: tuple[Do, str, str] = ("nothing", f"{known}: it recovers, or waits for nodes; {sentence}", "wait")
        return waiting if silent_s < WAITS_S else None
    if job.state not in _ENDED:
        return None
    remedy, advice = _ENDED[job.state]
    return remedy, f"Slurm ended job {job.number}: {job.state}{why}; {sentence}", advice
