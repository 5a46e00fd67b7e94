"""Invariant of two compared runs: same job, same dataset, same record of each step.

Values specific to a run are not compared: times, terms, worlds, and the few keys of `_OWN`.
"""

from __future__ import annotations

from collections.abc import Iterator

from chaos.judge.evidence.applied import lineage_of, result_of
from chaos.judge.evidence.holes import holes_of
from chaos.judge.evidence.run_files import Evidence, Line, manifests_of, part, whole
from chaos.judge.findings import Violated
from chaos.judge.invariants.exactly_once.agreement import differ

_OWN = {
    *(
        "run.dir",
        "run.name",
        "checkpoint.url",
        "tracking.mlflow_uri",
        "data.quarantine",
        "max_steps",
    ),
    *("parallel.shards", "parallel.offload", "task.params.lane_ms", "task.params.spoilt"),
}
"""Configuration keys that may differ: paths, a soak's end, sharding, pace, planted losses."""
_RECORDED = ("cursor", "order", "rng", "manifest_digest", "fast_steps")
_SAMPLES = ("coverage", "account", "skipped_steps")
"""Fields that differ after a fault made samples unreadable or a loss non-finite."""
_VALIDATED = ("metrics", "improvement")


def same_job(run: Evidence, reference: Evidence) -> str:
    """Both runs have the same configuration and manifest, and equal records of equal steps."""
    num_keys = _check_config(run, reference)
    manifests, expected = (manifests_of(each.folder, each.config) for each in (run, reference))
    if manifests and expected and differ(manifests, expected):
        raise Violated("the manifest of the training set is another one than that of the run without faults")
    ours, theirs = result_of(run), result_of(reference)
    if odd := sorted((ours.keys() ^ theirs.keys()) - {"mlflow_run_id"}):
        which = "run with faults" if odd[0] in ours else "run without faults"
        raise Violated(f"only the result of the {which} says {odd[0]}")
    is_whole = not holes_of(ours) and not run.has("nonfinite")
    recorded = _RECORDED + _SAMPLES * is_whole
    num_records = sum(_check_record(key, record, others, recorded) for key, record, others in _records(run, reference))
    return f"{num_keys} keys of the configuration, the manifest, and the records of {num_records} steps are the same"


def _check_config(run: Evidence, reference: Evidence) -> int:
    ours, theirs = (dict(_keys(each.config)) for each in (run, reference))
    own = f"{part(run.config, 'run').get('dir') if 'run' in run.config else None}/"
    for key in sorted(ours.keys() | theirs.keys()):
        if key == "data.train" and str(ours.get(key)).startswith(own):
            continue  # a copy of the training set, which faults may damage
        if key not in ours or key not in theirs or differ(ours[key], theirs[key]):
            said = f"is {ours.get(key)!r}, without faults it is {theirs.get(key)!r}"
            raise Violated(f"config.yaml: {key} {said}")
    return len(ours)


def _keys(tree: Line, path: tuple[str, ...] = ()) -> Iterator[tuple[str, object]]:
    """Yield the keys that must be equal in two runs of a job, with their values."""
    for name, value in tree.items():
        at = (*path, str(name))
        if isinstance(value, dict) and value:
            yield from _keys(value, at)
        elif ".".join(at) not in _OWN:
            yield ".".join(at), value


def _records(run: Evidence, reference: Evidence) -> Iterator[tuple[str, Line, list[Line]]]:
    """Yield the lineage's records, each with the other run's records up to that step, newest first."""
    lineage = {(one.term, one.step) for one in lineage_of(run)}
    others = [record.fields for record in reference.commits if record.fields is not None]
    for record in run.commits:
        if record.fields is None:
            continue
        step = whole(record.fields, "step")
        before = sorted((x for x in others if whole(x, "step") <= step), key=lambda x: -whole(x, "step"))
        if before and before[0]["step"] == step and (record.fields.get("term"), step) in lineage:
            yield record.key, record.fields, before


def _check_record(key: str, record: Line, others: list[Line], recorded: tuple[str, ...]) -> int:
    for name in recorded:
        if name in record and name in others[0] and differ(record[name], others[0][name]):
            raise Violated(f"{key} says {name} {record[name]}, without faults it is {others[0][name]}")
    for name in _VALIDATED:
        # A commit made before its step's validation has the metrics of the validation before.
        known = [other.get(name) for other in others]
        if record.get(name) is not None and all(differ(record[name], each) for each in known):
            raise Violated(f"{key} says {name} {record[name]}, without faults it is {known[0]}")
    return 1
