"""`elastic-chaos`: run a scenario with real faults, judge it, and judge old runs again."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Annotated

import yaml
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console
from rich.table import Table

from chaos import scenario as scenarios
from chaos.errors import ChaosError, RunError, ScenarioError
from chaos.local import Followed, Job, launch
from chaos.report import write as write_report
from chaos.scenario import Scenario
from chaos.verdict import FAULTED, REFERENCE, VERDICT, Verdict, examine, render
from elastic_train.cli import explain
from elastic_train.config import Config
from elastic_train.config import load as load_config
from elastic_train.data.manifest import load_manifest
from elastic_train.errors import ElasticTrainError
from elastic_train.order import Order
from elastic_train.progress import Progress, ResumeBanner, Status
from rendezvous.errors import RendezvousError
from rendezvous.server import EtcdServer

app = App(
    name="elastic-chaos",
    help="Break a training job on purpose, then prove from its files that nothing was lost, repeated or changed.",
)
console = Console(soft_wrap=True)
Json = Annotated[bool, Parameter(name="--json")]


@app.command
def run(
    scenario: str,
    *,
    seed: int | None = None,
    out: Path | None = None,
    reference: bool = True,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
    json_: Json = False,
) -> int:
    """Run SCENARIO (a file, or a name from `elastic-chaos ls`) with its faults, then without, and judge it.

    Drawn steps come from --seed, which is printed; the same seed draws the same steps. Results lie in --out
    (runs/<name> if not given): faulted/, reference/, verdict.json. --set batch.micro_batch=8 changes a key of the
    trainer's configuration. Exit code 0 only if the verdict is valid.
    """
    described = scenarios.load(scenarios.find(scenario))
    seed = described.seed if seed is None else seed
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    folder = out or Path("runs") / described.name
    settings = set_ or []
    replay = shlex.join(
        ["elastic-chaos", "run", scenario, "--seed", str(seed), *(f"--set={setting}" for setting in settings)]
    )
    verdict = execute(
        described, seed, folder, overrides=settings, replay=replay, with_reference=reference, is_quiet=json_
    )
    return tell(verdict, folder, json_)


@app.command
def check(folder: Path, *, json_: Json = False) -> int:
    """Judge the run in FOLDER again, from its files alone; verdict.json and report.html are made anew."""
    return tell(examine(folder), folder, json_)


@app.command
def report(folder: Path) -> int:
    """Make FOLDER/report.html again, from the run's files alone, and say where it lies."""
    console.print(write_report(folder, examine(folder)))
    return 0


@app.command
def sim(
    *,
    seeds: str = "200",
    seed: int | None = None,
    case: Path | None = None,
    minutes: float | None = None,
    nodes: int | None = None,
    processes: int | None = None,
    ledger: Path | None = None,
    json_: Json = False,
) -> int:
    """Run the product itself in virtual time, with faults drawn from --seeds (N, or A:B), and judge every run.

    --seed runs one of them and shows what was found, --case one that was written down. --minutes ends earlier, --nodes
    takes that many nodes in place of the drawn ones. Seeds are spread over --processes, one for each core if not given;
    the digest does not depend on that. --ledger FILE keeps a line for each seed, and goes on where the file ends. Exit
    code 0 only if no invariant is violated; else the first bad run is shrunk, kept below runs/sim, and told with the
    command that runs it again.
    """
    from chaos.sim import cases, command  # it loads all of the product, which no other command needs
    from chaos.sim.pool import cores
    from chaos.sim.simulate import case_of

    if case is not None:
        return command.run_one(cases.load(case), json_)
    if seed is not None:
        return command.run_one(case_of(seed, nodes), json_)
    campaign = command.Campaign(command.seeds_of(seeds), minutes, nodes, processes or len(cores()), ledger)
    return command.report(command.run_campaign(campaign, is_quiet=json_), campaign, json_)


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
        table.add_row(item.name, item.description, shape, ", ".join(f"{f.kind} {f.node}" for f in item.faults))
    console.print(table)
    return 0


def execute(
    scenario: Scenario,
    seed: int,
    folder: Path,
    *,
    overrides: list[str],
    replay: str,
    with_reference: bool = True,
    is_quiet: bool = False,
) -> Verdict:
    """Run a scenario with its faults and, separately, without; write and return the verdict.

    `replay` is the command that does the same again.
    """
    changes = [*_as_arguments(scenario.set), *_split(overrides)]
    config = load_config(scenario.config, environ=os.environ, arguments=changes)
    total_steps = count_steps(config)
    due = scenarios.schedule(scenario, seed, total_steps, config.checkpoint.every_steps or total_steps)
    say: Callable[[str], None] = (lambda _: None) if is_quiet else (lambda text: console.print(text, highlight=False))
    steps = ", ".join(
        f"{f.kind} {f.target} {f'{f.after_s:g} s later' if f.step is None else f'at step {f.step}'}" for f in due
    )
    say(f"scenario {scenario.name}, seed {seed}: {total_steps} steps, {steps or 'no faults'}")
    (folder / VERDICT).unlink(missing_ok=True)
    for name in (FAULTED, REFERENCE):
        if (folder / name).exists():
            shutil.rmtree(folder / name)
    names = [FAULTED, REFERENCE] if with_reference else [FAULTED]
    for name in names:
        say(f"training {'with' if name == FAULTED else 'the same without'} faults, in {folder / name}")
        started = time.monotonic()
        _run_once(scenario, folder / name, due if name == FAULTED else [], seed, changes, total_steps, replay, is_quiet)
        say(f"done in {time.monotonic() - started:.0f} s")
    return examine(folder)


def _run_once(
    scenario: Scenario,
    folder: Path,
    due: list[scenarios.Due],
    seed: int,
    changes: list[str],
    total_steps: int,
    replay: str,
    is_quiet: bool,
) -> None:
    folder.mkdir(parents=True)
    progress = Progress(Console(soft_wrap=True, quiet=is_quiet))
    shown: list[int] = [0]

    def look(followed: Followed) -> None:
        if followed.term != shown[0] and followed.world:
            progress.event(f"term {followed.term}: {followed.world} ranks")
            shown[0] = followed.term
        if followed.resumed is not None:
            progress.banner(ResumeBanner(**followed.resumed))  # type: ignore[arg-type]
            followed.resumed = None
        if followed.step:
            progress.update(
                Status(
                    step=followed.step,
                    total_steps=total_steps,
                    loss=followed.loss,
                    samples_per_s=followed.samples_per_s,
                    world=followed.world,
                    term=followed.term,
                    last_commit_step=followed.commit,
                    epoch=followed.epoch,
                )
            )

    own = ["--run.dir", str(folder), "--run.name", f"{scenario.name}-{folder.name}"]
    with EtcdServer() as server:
        nodes = launch(scenario, server.endpoint, folder, [*changes, *own], f"{scenario.name}-{folder.name}")
        try:
            Job(folder, nodes, scenario, due, seed, look, progress.event, replay).run()
        finally:
            progress.close()


def count_steps(config: Config) -> int:
    """Return how many steps the configured job takes."""
    order = Order(load_manifest(config.data.train).group_rows, num_lanes=config.batch.num_lanes, seed=config.run.seed)
    return config.max_steps or config.epochs * order.num_steps(config.batch.micro_batch)


def tell(verdict: Verdict, folder: Path, is_json: bool) -> int:
    """Write the report, print the verdict, and return the exit code that says it."""
    page = write_report(folder, verdict)
    if is_json:
        sys.stdout.write(json.dumps(verdict.fields) + "\n")
    else:
        console.print(render(verdict))
        again = f"; again with: {verdict.fields['replay']}" if verdict.fields["replay"] else ""
        console.print(f"{page} shows it, {folder / VERDICT} has the whole of it{again}", highlight=False)
    return 0 if verdict.is_valid else 1


def _as_arguments(tree: Mapping[str, object], prefix: str = "") -> list[str]:
    """Turn a tree of settings into the trainer's command-line arguments."""
    arguments: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict) and not (prefix == "task." and key == "params"):
            arguments += _as_arguments(value, f"{prefix}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
            arguments.append(f"--{prefix}{key}={text}")
    return arguments


def _split(settings: list[str]) -> list[str]:
    wrong = [setting for setting in settings if "=" not in setting]
    if wrong:
        raise ScenarioError(*(f"--set {setting}: write key=value" for setting in wrong))
    return [f"--{setting}" for setting in settings]


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> None:
    """Run a command and leave with its exit code; SIGTERM is answered like Ctrl-C and leaves no process behind."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = app(arguments, result_action="return_value", exit_on_error=False)
    except CycloptsError:
        sys.exit(ScenarioError.exit_code)  # cyclopts has said what is wrong
    except ElasticTrainError as error:
        sys.stderr.write(explain(error) + "\n")
        sys.exit(error.exit_code)
    except (ScenarioError, RunError, ChaosError, RendezvousError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in getattr(error, "problems", [str(error)])))
        sys.exit(getattr(error, "exit_code", 1))
    except KeyboardInterrupt:
        sys.stderr.write("stopped; no process was left behind\n")
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
