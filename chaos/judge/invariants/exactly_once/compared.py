"""Compare a run with one without faults: weights at the end and at commits, losses and metrics."""

from __future__ import annotations

from collections.abc import Iterator

from chaos.judge.evidence.applied import lineage_of, restored_at, result_of
from chaos.judge.evidence.holes import holes_of
from chaos.judge.evidence.run_files import Evidence, Line, manifests_of, part, whole
from chaos.judge.findings import Unknown, Violated
from chaos.judge.invariants.deliverable import undamaged
from chaos.judge.invariants.exactly_once.agreement import differ
from chaos.judge.invariants.tracked_values import kept_values

_EXACT = ("train/loss", "train/gradient_norm", "train/learning_rate", "train/truncated")


def same_weights(run: Evidence, reference: Evidence) -> str:
    """The final weights are bit-identical to those of the run without faults."""
    _check_reference(run, reference)
    ours, theirs = result_of(run)["weights_sha256"], result_of(reference)["weights_sha256"]
    if ours != theirs:
        raise Violated(f"the weights' SHA-256 is {str(ours)[:16]}, without faults it is {str(theirs)[:16]}")
    return f"sha256 {str(ours)[:16]} in both runs"


def same_weights_at_commits(run: Evidence, reference: Evidence) -> str:
    """Every commit has the weights of the run without faults at its step, wherever both made one.

    If samples or updates were skipped, an abandoned branch may have skipped others: then only the lineage's commits are
    compared.
    """
    _check_reference(run, reference)
    is_partial = bool(holes_of(result_of(run))) or run.has("nonfinite")
    lineage = {(applied.term, applied.step) for applied in lineage_of(run)} if is_partial else None
    expected = {step: weights for _, step, weights in _committed_weights(reference)}
    compared = set[tuple[int, int]]()
    begun = {term: (line.get("applied_by"), line["step"]) for term, line in restored_at(run).items()}
    for term, step, weights in _committed_weights(run):
        # A world that commits its initial state has not applied that step itself.
        applied = begun[term] if term in begun and begun[term][1] == step else (term, step)
        if step not in expected or (lineage is not None and applied not in lineage):
            continue
        compared.add((term, step))
        if weights != expected[step]:
            where = f"the commit of step {step} (term {term})"
            raise Violated(f"{where} has weights of SHA-256 {weights[:16]}, without faults {expected[step][:16]}")
    if not compared:
        raise Unknown("the two runs have no commit of the same step")
    num_states = 0 if is_partial else _compare_states(run, reference)
    summary = f"{len(compared)} commits have the same hash in both runs, by records and histories"
    return summary + (f"; {num_states} hold the same state of optimizer, schedule and averages" if num_states else "")


def _compare_states(run: Evidence, reference: Evidence) -> int:
    """Compare the rest of the state in the lineage's commits that both runs kept; return their number."""
    if run.state is None or reference.state is None:
        return 0
    lineage = {(applied.term, applied.step) for applied in lineage_of(run)}
    expected = {whole(fields, "step"): fields for commit in reference.commits if (fields := commit.fields) is not None}
    num_compared = 0
    for commit in undamaged(run, run.commits):
        fields = commit.fields
        if fields is None or (whole(fields, "term"), step := whole(fields, "step")) not in lineage:
            continue
        if step not in expected:
            continue
        num_compared += 1
        ours, theirs = run.state(fields), reference.state(expected[step])
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                raise Violated(f"{commit.key} holds another {name} than the run without faults had at its step")
    return num_compared


def _committed_weights(run: Evidence) -> list[tuple[int, int, str]]:
    """Return term, step and weights hash of every commit, from histories and remaining records."""
    lines = [*run.of("commit"), *(commit.fields for commit in run.commits if commit.fields is not None)]
    known = [line for line in lines if line.get("weights_sha256")]
    return sorted((whole(line, "term"), whole(line, "step"), str(line["weights_sha256"])) for line in known)


def same_metrics(run: Evidence, reference: Evidence) -> str:
    """The last validation gives the same numbers as in the run without faults."""
    _check_reference(run, reference)
    ours, theirs = result_of(run)["metrics"], result_of(reference)["metrics"]
    if differ(ours, theirs):
        raise Violated(f"validation gave {ours}, without faults {theirs}")
    is_partial = bool(holes_of(result_of(run))) or run.has("nonfinite") or run.pruned or reference.pruned
    if run.metrics is None or reference.metrics is None or is_partial:
        return "both results say the same metrics"
    logged, expected = ({**kept_values(each)} for each in (run, reference))
    shared = [place for place in logged.keys() & expected.keys() if _is_exact(place[0])]
    for name, step in sorted(shared, key=lambda place: (place[1], place[0])):
        if differ(logged[name, step], expected[name, step]):
            logged_as = f"{name} of step {step} was logged as {logged[name, step]}"
            raise Violated(f"{logged_as}, without faults as {expected[name, step]}")
    return f"both results say the same metrics, and {len(shared)} logged values of steps and validations are the same"


def _is_exact(name: str) -> bool:
    """Return True if a metric depends on samples and weights only, not on the world or its speed."""
    return name.startswith("validation/") or name in _EXACT


def same_losses(run: Evidence, reference: Evidence) -> str:
    """Every step of the lineage has the loss of the run without faults."""
    _check_reference(run, reference)
    expected = {whole(line, "step"): line["loss"] for line in reference.of("step")}
    for applied in lineage_of(run):
        loss = applied.lines[0]["loss"]
        if differ(loss, expected[applied.step]):
            where = f"step {applied.step} (term {applied.term})"
            raise Violated(f"{where} had loss {loss}, without faults {expected[applied.step]}")
    return f"{len(expected)} steps, the same loss in both runs"


def _check_reference(run: Evidence, reference: Evidence) -> None:
    if reference.of("fault"):
        raise Unknown("the reference had faults itself")
    told = ("pid", "started_at", "host", "boot", "born")
    pids = [{tuple(line.get(key) for key in told) for line in evidence.of("form")} for evidence in (run, reference)]
    if not pids[1]:
        raise Unknown("the reference has no history of its own")
    if pids[0] & pids[1]:
        raise Unknown("the reference is a copy of the run itself, not another run")


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
    """Both runs have the same configuration and manifest, and equal records of equal steps.

    Values specific to a run are not compared: times, terms, worlds, and the few keys of `_OWN`.
    """
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
