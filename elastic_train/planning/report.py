"""A complete plan: the run's own layout, its scaling, the best layouts, and the excluded ones; as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from elastic_train.planning.arithmetic.layouts import Layout
from elastic_train.planning.arithmetic.model import MOST_LANES
from elastic_train.planning.search import Job, Outcome, ScalingRow, best, compare, scaling, work_out
from elastic_train.system.wording import counted, duration, rate, size


@dataclass(frozen=True, slots=True)
class Report:
    """The plan of a job; `best` is ranked by `by`, `refused` lists excluded layouts with their reasons."""

    job: Job
    by: str
    own: Outcome
    best: list[Outcome]
    refused: list[tuple[str, str]]
    strong: list[ScalingRow]
    weak: list[ScalingRow]

    def refused_by_reason(self) -> dict[str, list[str]]:
        """Return the names of the excluded layouts by reason."""
        names: dict[str, list[str]] = {}
        for name, why in self.refused:
            names.setdefault(why, []).append(name)
        return names

    def lines(self) -> Iterator[str]:
        job, own = self.job, self.own
        model = job.model
        yield (
            f"{model.name}: {model.elements / 1e6:,.1f} M parameters, {model.trained / 1e6:,.1f} M of them trained, in "
            f"{counted(len(model.blocks), 'block')}; {model.flops / model.samples:.4g} FLOPs a sample"
            + (f", {model.flops / model.tokens:.4g} a token" if model.tokens else "")
        )
        yield f"{job.batch.num_lanes} lanes of {job.batch.micro_batch}, {job.num_steps} steps, on {job.cluster.name}"
        if model.tokens:
            lanes = counted(min(job.batch.num_lanes, MOST_LANES), "lane")
            yield (
                f"A row has {rate(model.tokens / model.samples)} tokens with padding: the mean of the first step's "
                f"first {lanes}, from the data and max_tokens of this configuration"
            )
        yield f"This configuration: {own.layout.name}"
        yield from (f"It cannot be used: {why}" for why in own.problems)
        if not own.problems and own.step is not None and own.goodput is not None:
            step = own.step
            waits = f"waits for links {step.communication_share:.1%}, {duration(step.hidden_s)} of exchanges are hidden"
            yield (
                f"A step takes {duration(step.total_s)} ({duration(step.compute_s)} computes, {waits}), "
                f"{rate(own.per_s)} {model.amount}/s, MFU {own.mfu:.1%}, {size(step.sent_bytes)} sent by a device"
            )
            yield (
                f"The run takes {duration(86400 * own.days)}"
                + (f" and {own.cost:,.0f}" if own.cost else "")
                + f" at a goodput "
                f"of {own.goodput.share:.2%}: a fault is expected every {duration(own.goodput.mtbf_s)}, save every "
                f"{duration(own.goodput.save_every_s)}"
            )

    def as_json(self) -> dict[str, object]:
        job = self.job
        model = job.model
        return {
            "model": {
                "name": model.name,
                "parameters": model.elements,
                "trained": model.trained,
                "blocks": len(model.blocks),
                "flops_per_sample": model.flops / model.samples,
                "flops_per_token": model.flops / model.tokens if model.tokens else None,
            },
            "on": job.cluster.name,
            "lanes": job.batch.num_lanes,
            "steps": job.num_steps,
            "own": outcome_json(self.own),
            "by": self.by,
            "best": [outcome_json(one) for one in self.best],
            "refused": [{"layout": name, "why": why} for name, why in self.refused],
            "scaling": {"strong": [_row(row) for row in self.strong], "weak": [_row(row) for row in self.weak]},
        }


def make_report(job: Job, layout: Layout, by: str, *, with_cells: bool) -> Report:
    outcomes = compare(job, layout, with_cells=with_cells)
    refused = [(one.layout.name, "; ".join(one.problems)) for one in outcomes if one.problems]
    strong, weak = (scaling(job, layout, weak=weak) for weak in (False, True))
    own = work_out(job, layout.fitting(job.cluster.size))
    return Report(job, by, own, best(outcomes, by), refused, strong, weak)


def outcome_json(one: Outcome) -> dict[str, object]:
    memory = (
        None if one.memory is None else {**one.memory.parts, "host": one.memory.host_bytes, "total": one.memory.total}
    )
    step = None if one.step is None else {**asdict(one.step), "total_s": one.step.total_s}
    return {
        "layout": {**asdict(one.layout), "name": one.layout.name, "runs_today": one.layout.runs_today},
        "devices": one.devices,
        "problems": list(one.problems),
        "memory_bytes": memory,
        "step": step,
        "goodput": None if one.goodput is None else asdict(one.goodput),
        **one.figures,
    }


def _row(row: ScalingRow) -> dict[str, object]:
    figures = row.outcome.figures
    return {
        "devices": row.devices,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "fits": not row.outcome.problems,
        **{name: figures[name] for name in ("step", "throughput", "mfu", "communication", "memory")},
    }
