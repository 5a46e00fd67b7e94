"""Measure the accuracy and the cost of monitoring.

    python -m benchmarks.insight [--json] [--quick] [--only NAME]

overhead_always_on    CPU time that a rank spends on phases and memory in a step, over that of the step: marks, its
                      row's columns, and what rank 0 adds up, of a rank with 8 lanes in a world of 8 (goal: at most
                      0.005)
always_on_us          the same in microseconds a step, with the step's own
health_check_s        how long a worker examines its machine before it joins (products, memory, disk, clock): alone, in
                      CPU time, and with four busy processes on every core, the median and the longest (goal: 10)
straggler_precision   of what the detector says of ranks, how much is right: the rank, and its compute, data or link;
                      over 100 drawn jobs of 2 to 16 ranks with noise and hiccups, in which a rank becomes slow, or none
                      does (goal: 0.95). Rows are drawn, not measured: no process is slowed
straggler_recall      how many of the slow ranks are named (goal: 0.95)
straggler_latency_steps
                      the most steps until one is (goal: 30)
slowed_precision      the same of processes that are really slowed, 100 drawn cases in two jobs: busy
                      neighbours, SIGSTOP for a part of the time, late packets, late rows (goal: 0.95). Minutes on an
                      idle machine; on a busy one others are slow, too
slowed_recall         (goal: 0.95)
slowed_latency_steps  from the first step whose row shows it (goal: 30)
slowed_cases          how many there were, and of what
quiet_alarms          what is said of ranks in ten minutes of the same jobs in which nobody is slowed (goal: 0)
quiet_steps           how many steps these were
branches              milliseconds of a rank's phases in jobs that scale badly for a known reason, one for each branch
                      of the guide on scaling that concerns all ranks; which share of a step grew most; what was said
branches_as_said      whether each is the phase, and the event, that the guide says (goal: true; on an idle machine)
plan_step_error       by how much the seconds of a step that `elastic-train plan` gives are off at the most: a decoder,
                      a text classifier and a small ResNet on 1, 2 and 4 ranks over a wire of known alpha and beta,
                      and the decoder in each mode of sharding (goal: at most 0.15)
plan_memory_error     the same of the most memory of a rank (goal: at most 0.10)
plan_step_errors      the same by case: model, mode, ranks; more than measured is positive
plan_memory_errors    the same by case
promtool              whether Prometheus's own tool accepts the alert rules and the configuration that are shipped, and
                      all tests of the rules pass (goal: true)

The last line is JSON.
"""

from __future__ import annotations

from benchmarks.figures import Measure, measure_chosen
from benchmarks.insight import always_on, branches, health, planned, rules, slowed, stragglers

FIGURES: dict[str, Measure] = {
    "overhead_always_on": always_on.overhead,
    "always_on_us": always_on.overhead,
    "health_check_s": health.examination,
    "straggler_precision": stragglers.straggler_figures,
    "straggler_recall": stragglers.straggler_figures,
    "straggler_latency_steps": stragglers.straggler_figures,
    "slowed_precision": slowed.figures,
    "slowed_recall": slowed.figures,
    "slowed_latency_steps": slowed.figures,
    "slowed_cases": slowed.figures,
    "quiet_alarms": slowed.quiet_minutes,
    "quiet_steps": slowed.quiet_minutes,
    "branches": branches.branches,
    "branches_as_said": branches.branches,
    "plan_step_error": planned.errors,
    "plan_memory_error": planned.errors,
    "plan_step_errors": planned.errors,
    "plan_memory_errors": planned.errors,
    "promtool": rules.promtool,
}


if __name__ == "__main__":
    measure_chosen("benchmarks.insight", __doc__, FIGURES)
