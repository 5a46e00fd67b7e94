"""Small files that refer to the run: they must agree with records, histories and result.

Not verifiable, hence believed: the job's name in mlflow.json, the store's word in store-id, which no other file
repeats, and which of the run's commits head.json names: a leader that was stopped may write it late.
"""

from __future__ import annotations

import json

from chaos.judge.evidence.run_files import Evidence, Line
from chaos.judge.findings import Violated
from chaos.judge.invariants.exactly_once.agreement import differ

_WORD = 15


def check_pointers(run: Evidence) -> None:
    """Check head.json, mlflow.json and store-id, where they exist."""
    if (head := _read(run, "head.json")) is not None:
        steps = {str(line["key"]): line["step"] for line in run.of("commit")}
        steps |= {commit.key: commit.fields["step"] for commit in run.commits if commit.fields is not None}
        key = str(head.get("commit"))
        if key not in steps or differ(head.get("step"), steps[key]):
            known = f"is of step {steps[key]}" if key in steps else "is no commit of the run"
            raise Violated(f"head.json names {key} of step {head.get('step')}, which {known}")
    if (link := _read(run, "mlflow.json")) is not None:
        ours, told = link.get("run_id"), (run.result or {}).get("mlflow_run_id")
        if told is not None and ours != told:
            raise Violated(f"mlflow.json names the run {ours}, result.json {told}")
        tracking = run.config.get("tracking")
        place = str(tracking.get("mlflow_uri") or "") if isinstance(tracking, dict) else ""
        ends = place.rpartition("://")[2].lstrip("./")  # a database's path is resolved
        if "@" not in place and not str(link.get("mlflow_uri")).endswith(ends):
            raise Violated(f"mlflow.json names the tracker {link.get('mlflow_uri')}, config.yaml {place}")
    path = run.folder / "store-id"
    word = path.read_text(errors="replace").strip() if path.is_file() else None
    if word is not None and (len(word) != _WORD or not set(word) <= set("0123456789abcdef")):
        raise Violated(f"store-id holds {word[:40]!r}, which is no word of a store")


def _read(run: Evidence, name: str) -> Line | None:
    path = run.folder / name
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise Violated(f"{name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Violated(f"{name} does not hold a mapping")
    return found
