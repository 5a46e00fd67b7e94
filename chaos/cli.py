"""`elastic-chaos`: run a scenario with real faults, judge it, and judge old runs again."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from chaos.errors import ChaosError, RunError, ScenarioError
from chaos.judge.verdict import (
    FAULTED,
    REFERENCE,
    VERDICT,
    Verdict,
    examine,
    render,
)
from chaos.real import storm as storms
from chaos.real.runs import (
    clear,
    copy_holes,
    count_steps,
    make_data,
    own_of_second,
    run_once,
    run_soak,
    spoilt_lanes,
    undoable,
    unslowed,
)
from chaos.real.slurm.run import BESIDE
from chaos.scenario import model as scenarios
from chaos.scenario.kinds import KINDS
from chaos.scenario.layouts import LAYOUTS, behind
from chaos.scenario.model import Scenario
from chaos.scenario.schedule import Due, schedule
from chaos.scenario.soak import drawn_nodes, drawn_shards
from chaos.script import watch as scripts
from elastic_train.cli.output import NO_EMPTY, Flag, Json, quiet_output, wrong_usage
from elastic_train.config.sources import as_argument
from elastic_train.config.sources import load as load_config
from elastic_train.errors import ElasticTrainError, explain
from elastic_train.system.extras import needed_for
from rendezvous.errors import RendezvousError

app = App(
    name="elastic-chaos",
    suppress_keyboard_interrupt=False,
    help="Break a training job on purpose, then prove from its files that nothing was lost, repeated or changed.",
    error_formatter=partial(wrong_usage, "elastic-chaos"),
    default_parameter=NO_EMPTY,
)
console = Console(markup=False, soft_wrap=True)


@app.command
def run(
    scenario: str | None = None,
    *,
    command: str | None = None,
    nodes: int | None = None,
    seed: int | None = None,
    out: Path | None = None,
    faults: int | None = None,
    minutes: float | None = None,
    network: str | None = None,
    reference: bool = True,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    json_: Json = False,
) -> int:
    """Run SCENARIO (a file, or a name from `elastic-chaos ls`) with its faults, then without, and judge it.

    Drawn steps come from --seed, which is printed; the same seed draws the same steps. Results go to --out
    (runs/<name> if not given): faulted/, reference/, verdict.json, report.html. --set batch.micro_batch=8 changes a key
    of the trainer's configuration. A soak runs for so many --faults, or --minutes; Ctrl-C ends it sooner, with a
    verdict. --network puts the last node behind a link (10gbe, 100gbe, cross_zone, cross_region), and prints what was
    asked and what is measured. Exit code 0 only if the verdict is valid.

    --command "torchrun train.py {dir}" breaks a script of your own instead; without SCENARIO, any-script's faults. The
    line is started once for each of --nodes (2), all on this machine. What it leaves out reaches torchrun by its own
    PET_ variables: --nnodes, --nproc-per-node, --max-restarts, --rdzv-id, --rdzv-endpoint, and --rdzv-backend=c10d;
    with --rdzv-backend=etcd in it, an etcd is started. {dir} becomes a folder of this run, for its snapshots.
    Three lines in the script log which samples were applied: `from chaos.hook import log_ids`.
    """
    if scenario is None and command is None:
        raise ScenarioError("name a SCENARIO (`elastic-chaos ls` shows them), or give the --command to break")
    name = scenario or scripts.DEFAULT
    described = scenarios.bounded(scenarios.load(scenarios.find(name)), faults, minutes)
    if nodes is not None:
        described = described.model_copy(update={"nodes": described.nodes.model_copy(update={"count": nodes})})
        if problems := list(scenarios.impossible(described.nodes, described.faults, described.slurm.at_first)):
            raise ScenarioError(*(f"--nodes {nodes}, {name}: {problem}" for problem in problems))
    described = described.model_copy(update={"reference": described.reference and reference})
    described = behind(described, network)
    seed = described.seed if seed is None else seed
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    folder = out or Path("runs") / described.name
    settings = set_ or []
    options = [*(["--command", command] if command else []), *(["--nodes", str(nodes)] if nodes else [])]
    changes = [*(f"--set={setting}" for setting in settings), *([] if reference else ["--no-reference"])]
    changes += [f"--network={network}"] if network else []
    bounds = [*([f"--faults={faults}"] if faults else []), *([f"--minutes={minutes:g}"] if minutes else [])]
    replay = shlex.join(["elastic-chaos", "run", name, *options, "--seed", str(seed), *changes, *bounds])
    if command is not None and (settings or network):
        raise ScenarioError("--set and --network are for the trainer's own runs; a --command has none of its keys")
    try:
        if command is not None:
            verdict = scripts.execute(command, described, seed, folder, replay=replay, say=_say(json_))
        else:
            verdict = execute(described, seed, folder, overrides=settings, replay=replay, is_quiet=json_)
    except KeyboardInterrupt:
        if (folder / FAULTED / "history").is_dir():
            sys.stderr.write(f"`elastic-chaos check {folder}` judges what was done, up to the newest commit\n")
        raise
    return present(verdict, folder, json_)


@app.command
def storm(
    *,
    faults: int = 5000,
    per_job: int = 50,
    seed: int = 1,
    layouts: str | None = None,
    network: str | None = None,
    out: Path = Path("runs/storm"),
    json_: Json = False,
) -> int:
    """Break one job after another, in all layouts of state and ranks, until there were so many real --faults.

    Each job is a soak of --per-job faults with its own seed (--seed and up), and has a verdict and a line in
    OUT/ledger.jsonl. The same command continues where that ends; Ctrl-C ends the job at hand with a verdict, then the
    storm. --layouts whole,tensor: only these. Folders of jobs that are not valid stay. Exit code 0 if all are, else 1.
    """
    names = list(LAYOUTS) if layouts is None else layouts.split(",")
    whole, say = storms.Storm(faults, per_job, seed, names, out, network), _say(json_)
    say(f"storm of {faults} faults in {out}; continue with: {whole.replay}")

    def run_one(scenario: Scenario, seed: int, folder: Path, replay: str) -> Verdict:
        return execute(scenario, seed, folder, overrides=[], replay=replay, is_quiet=json_)

    tally = storms.run_storm(whole, run_one, say)
    if json_:
        sys.stdout.write(json.dumps(tally.fields()) + "\n")
    return 1 if tally.failed else 0


@app.command
def check(folder: Path, *, json_: Json = False) -> int:
    """Judge the run in FOLDER again, from its files alone; and write verdict.json and report.html again."""
    return present(examine(folder), folder, json_)


@app.command
def sim(
    *,
    seeds: str = "200",
    seed: int | None = None,
    case: Path | None = None,
    scenario: str | None = None,
    plant: str | None = None,
    nodes: str | None = None,
    hours: float | None = None,
    faults_per_hour: float = 120.0,
    step_s: float = 10.0,
    shards: Flag = False,
    cells: Flag = False,
    stages: Flag = False,
    processes: int | None = None,
    ledger: Path | None = None,
    json_: Json = False,
) -> int:
    """Run the product itself in virtual time, with faults drawn from --seeds (N, or A:B), and judge every run.

    --seed runs one of them and shows what was found, --case one that was written down, --scenario (with --seed) one
    that `run` does to real nodes. --plant canary breaks a promise that the product relies on, other names (a wrong one
    lists them) the product itself: such a run has to be found bad, with exit code 1. --nodes
    takes so many nodes (or 16..64: drawn from these) in place of the drawn ones. --hours makes each seed a job of so
    many virtual hours, with --faults-per-hour, whose steps take --step-s and whose leases half of that or as long.
    --shards lets every job train a real, tiny model in shards, else one in eight short ones does. --cells makes each a
    job whose replicas are cells of several workers, on 4 to 16 nodes if --nodes does not say, and --stages lets these
    cells have stages, which may be of different nodes; with --shards, too, moments are in shares over ranks of a place.
    Seeds are spread over --processes, one for each core if not given; the digest does not depend on that. --ledger FILE
    keeps a line for each seed, and runs only those that it does not hold. Exit code 0 only if no invariant is violated;
    else the first bad run is shrunk, kept below runs/sim, and printed with the command that runs it again.
    """
    with needed_for("elastic-chaos sim"):
        from chaos.sim.campaign import cases, command, long_runs  # all of the product, which no other command needs
        from chaos.sim.campaign.planted.catalogue import named
        from chaos.sim.campaign.pool import num_cores
        from chaos.sim.campaign.rehearsal import rehearse

    if scenario is not None:
        described = scenarios.load(scenarios.find(scenario))
        seed = seed if seed is not None else described.seed or 0
        again = f"elastic-chaos sim --scenario {scenario} --seed {seed}"
        return command.run_one(rehearse(described, seed), json_, again, is_scenario=True)
    if case is not None:
        return command.run_one(cases.load(case), json_, f"elastic-chaos sim --case {case}")
    if plant is not None:
        return command.run_planted(named(plant), json_)
    _check_positive(hours=hours, faults_per_hour=faults_per_hour, step_s=step_s, processes=processes)
    if stages and not cells:
        raise ScenarioError("--stages needs --cells")
    of_nodes = None if nodes is None else long_runs.nodes_of(nodes)
    draw = long_runs.Draw(of_nodes, hours, faults_per_hour, step_s, shards, cells, stages)
    if seed is not None:
        again = " ".join(["elastic-chaos sim", *([draw.options] if draw.options else []), f"--seed {seed}"])
        return command.run_one(draw.case(seed), json_, again)
    campaign = command.Campaign(command.seeds_of(seeds), draw, processes or num_cores(), ledger)
    return command.report(command.run_campaign(campaign, is_quiet=json_), campaign, json_)


def _check_positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and value <= 0:
            raise ScenarioError(f"--{name.replace('_', '-')} {value:g}: give more than 0")


@app.command
def ls(*, json_: Json = False) -> int:
    """List the scenarios that come with the package."""
    known = [scenarios.load(path) for path in sorted(scenarios.FOLDER.glob("*.yaml"))]
    if json_:
        console.print_json(json.dumps([item.model_dump(mode="json") for item in known]))
        return 0
    table = Table("scenario", "what happens", "nodes x ranks", "faults")
    for item in known:
        shape = f"{item.nodes.count} x {item.nodes.ranks}"
        faults = ", ".join(f"{f.kind} {'' if f.node is None else f.node}".rstrip() for f in item.faults)
        table.add_row(item.name, item.description, shape, faults or (f"{item.soak.faults} drawn" if item.soak else ""))
    console.print(table)
    return 0


@app.command
def kinds(*, json_: Json = False) -> int:
    """List the kinds of fault, what each means, and where it can be injected: in real runs, in the simulator."""
    if json_:
        console.print_json(json.dumps([asdict(kind) for kind in KINDS.values()]))
        return 0
    table = Table("kind", "what happens", "to", "lasts for_s", "run", "sim")
    for kind in KINDS.values():
        marks = ["yes" if done else "" for done in (kind.local, kind.sim)]
        table.add_row(kind.name, kind.meaning, kind.aim, kind.lasts, *marks)
    console.print(table)
    return 0


def execute(
    scenario: Scenario,
    seed: int,
    folder: Path,
    *,
    overrides: list[str],
    replay: str,
    is_quiet: bool = False,
) -> Verdict:
    """Run a scenario with its faults and, separately, without; write and return the verdict.

    `replay` is the command that does the same again.
    """
    scenario = scenario.model_copy(update={"nodes": drawn_nodes(scenario, seed)})
    drawn = {"parallel": drawn_shards(scenario, seed)}
    changes = [*_as_arguments(drawn), *_as_arguments(scenario.set), *_split(overrides)]
    if scenario.config is None:
        raise ScenarioError(f"{scenario.name} has no config: it is for scripts; give it one with --command")
    if scenario.soak is None and (problems := list(undoable(scenario))):
        raise ScenarioError(*(f"{scenario.name}: {problem}" for problem in problems))
    say = _say(is_quiet)
    config = load_config(scenario.config, environ=os.environ, arguments=changes)
    make_data(scenario, config, say)
    if scenario.soak is not None:
        return run_soak(scenario, seed, folder, changes, config, replay, is_quiet, say)
    total_steps = count_steps(config)
    every = config.checkpoint.every_steps
    due = schedule(scenario, seed, total_steps, every if isinstance(every, int) else total_steps)
    steps = ", ".join(str(fault) for fault in due)
    say(f"scenario {scenario.name}, seed {seed}: {total_steps} steps, {steps or 'no faults'}")
    clear(folder)

    def train(where: Path, faults: list[Due], own: list[str]) -> None:
        say(f"training {'with' if where.name == FAULTED else 'the same without'} faults, in {where}")
        started = time.monotonic()
        run_once(scenario, config, where, faults, seed, own, total_steps, replay, is_quiet)
        say(f"done in {time.monotonic() - started:.0f} s")

    train(folder / FAULTED, due, changes)
    jobs: list[tuple[Path, list[str]]] = [(folder, []), (folder / BESIDE, own_of_second(config))]
    for where, own in jobs[: scenario.slurm.jobs if scenario.reference else 0]:
        copy_holes(where)
        train(where / REFERENCE, [], [*changes, *own, *unslowed(config, spoilt_lanes(config, where))])
    return examine(folder)


def _say(is_quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if is_quiet else (lambda text: console.print(text, highlight=False, markup=False))


def present(verdict: Verdict, folder: Path, is_json: bool) -> int:
    """Write the report, print the verdict, and return the exit code that says it: of two jobs, of both."""
    code = _present(verdict, folder, is_json)
    if (folder / BESIDE / FAULTED).is_dir():
        code = max(code, _present(examine(folder / BESIDE), folder / BESIDE, is_json))
    return code


def _present(verdict: Verdict, folder: Path, is_json: bool) -> int:
    from chaos.report import write

    page = write(folder, verdict)
    if is_json:
        sys.stdout.write(json.dumps(verdict.fields) + "\n")
    else:
        console.print(render(verdict))
        again = f"; again with: {verdict.fields['replay']}" if verdict.fields["replay"] else ""
        console.print(f"{page} shows it, {folder / VERDICT} has the whole of it{again}", highlight=False, markup=False)
    return 0 if verdict.is_valid else 1


def _as_arguments(tree: Mapping[str, object], prefix: str = "") -> list[str]:
    """Turn a tree of settings into the trainer's command-line arguments."""
    arguments: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict) and not (prefix == "task." and key == "params"):
            arguments += _as_arguments(value, f"{prefix}{key}.")
        else:
            arguments.append(as_argument(f"{prefix}{key}", value))
    return arguments


def _split(settings: list[str]) -> list[str]:
    wrong = [setting for setting in settings if "=" not in setting]
    if wrong:
        raise ScenarioError(*(f"--set {setting}: write key=value" for setting in wrong))
    return [f"--{setting}" for setting in settings]


def _interrupt(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)  # what is taken away now, is taken away whole
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run a command of this program, and leave with its exit code."""
    leave_with(lambda: app(arguments, result_action="return_value", exit_on_error=False))


def leave_with(command: Callable[[], object]) -> NoReturn:
    """Exit with a command's exit code, or with an error's, printed line by line.

    SIGTERM does what Ctrl-C does, and leaves no process running.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        with quiet_output():
            result = command()
    except CycloptsError:
        sys.exit(ScenarioError.exit_code)  # cyclopts has said what is wrong
    except ElasticTrainError as error:
        sys.stderr.write(explain(error) + "\n")
        sys.exit(error.exit_code)
    except (ScenarioError, RunError, ChaosError, RendezvousError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in getattr(error, "problems", [str(error)])))
        sys.exit(getattr(error, "exit_code", 1))
    except OSError as error:
        if error.filename is None:  # of no place that anybody named
            raise
        sys.stderr.write(f"error: {error.filename}: {error.strerror}; name another place, or repair this one\n")
        sys.exit(ChaosError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; no process is left running\n")
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
