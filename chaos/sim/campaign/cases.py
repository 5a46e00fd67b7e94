"""Cases as YAML files: failing seeds, shrunk and kept as regressions that the tests run again."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from chaos.errors import ScenarioError
from chaos.sim.campaign.simulate import Case
from chaos.sim.job.fault import AT_POINTS, POINTS, SimFault
from chaos.sim.job.kinds import KINDS
from chaos.sim.job.shape import Shape
from elastic_train.config.yaml12 import NOT_YAML

FOLDER = Path(__file__).parent / "regressions"
_CASE = TypeAdapter(Case)


def save(case: Case, path: Path, why: str) -> None:
    """Write a case without its default values; the first line is a comment that says what it broke."""
    tree = {
        "seed": case.seed,
        "shape": _unusual(case.shape, Shape()),
        "faults": [{"kind": fault.kind, **_unusual(fault, SimFault(fault.kind))} for fault in case.faults],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {why.splitlines()[0]}\n" + yaml.safe_dump(tree, sort_keys=False))


def load(path: Path) -> Case:
    """Read a case; raise ScenarioError with every problem found."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, *NOT_YAML) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from error
    try:
        case = _CASE.validate_python(tree)
    except ValidationError as error:
        problems = [f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ScenarioError(*(f"{path}: {problem}" for problem in problems)) from error
    unknown = [fault for fault in case.faults if not _is_known(fault)]
    if unknown:
        raise ScenarioError(*(f"{path}: no fault '{fault.kind}' at '{fault.point}'" for fault in unknown))
    return case


def _is_known(fault: SimFault) -> bool:
    return fault.kind in AT_POINTS and fault.point in POINTS if fault.point else fault.kind in KINDS


def _unusual(value: Shape | SimFault, usual: Shape | SimFault) -> dict[str, object]:
    names = [field.name for field in fields(value) if getattr(value, field.name) != getattr(usual, field.name)]
    tree = {name: content for name, content in asdict(value).items() if name in names}
    return {name: list(content) if isinstance(content, tuple) else content for name, content in tree.items()}
