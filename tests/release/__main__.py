"""Make a release in a folder: `python -m tests.release dist`, or `make release`.

The source distribution, and the wheel made of that alone, both the same bytes whoever makes them; a bill of materials
(CycloneDX) of all that the package and its extras need as it is installed here, without development's; a table of their
licences; and SHA-256 sums of all of these.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import metadata, requires
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
Document = dict[str, Any]


def main(folder: Path) -> None:
    """Write all files of a release; exits with an error if the changelog has no section for the version."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if not is_told(version, (ROOT / "CHANGELOG.md").read_text()):
        sys.exit(f"release: CHANGELOG.md has no section '## {version}': say there what it changes for users")
    folder.mkdir(parents=True, exist_ok=True)
    _run("build", "--no-isolation", "--outdir", folder, ROOT)
    bill = bill_of_materials()
    (folder / "sbom.cdx.json").write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    (folder / "licenses.md").write_text(licences(bill))
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text("".join(sums))
    sys.stdout.write((folder / "SHA256SUMS").read_text())


def is_told(version: str, changelog: str) -> bool:
    """Return True if a changelog has a section for a version."""
    return f"## {version}" in changelog.splitlines()


def bill_of_materials() -> Document:
    """Return the installed packages that the package or a user-facing extra needs."""
    with tempfile.TemporaryDirectory() as made:
        out = Path(made) / "sbom.json"
        described = ("--pyproject", ROOT / "pyproject.toml", "--output-reproducible")
        _run("cyclonedx_py", "environment", *described, "--output-file", out, sys.executable)
        found: Document = json.loads(out.read_text())
    needed = _needed()
    found["components"] = [each for each in found["components"] if canonicalize_name(each["name"]) in needed]
    kept = {each["bom-ref"] for each in (*found["components"], found["metadata"]["component"])}
    edges = ((each["ref"], each.get("dependsOn", [])) for each in found["dependencies"] if each["ref"] in kept)
    found["dependencies"] = [{"ref": ref, "dependsOn": [to for to in needs if to in kept]} for ref, needs in edges]
    return found


def _needed() -> set[str]:
    """Return the names of all direct and transitive requirements; the tool itself ignores markers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: each for name, each in project["optional-dependencies"].items() if name != "dev"}
    waiting = [Requirement(each) for each in (*project["dependencies"], *chain.from_iterable(extras.values()))]
    seen = set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        for extra in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), extra)) not in seen:
                seen.add(key)
                further = map(Requirement, requires(requirement.name) or ())
                waiting += [each for each in further if each.marker is None or each.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def licences(bill: Document) -> str:
    """Return a bill of materials as a table."""
    rows = [f"| {each['name']} | {each['version']} | {_licence(each)} |" for each in bill["components"]]
    return "\n".join(["| package | version | licence |", "|---|---|---|", *sorted(rows, key=str.lower)]) + "\n"


def _licence(component: Document) -> str:
    """Return a package's licence from the bill or, failing that, from the free text in its metadata."""
    named = [
        each.get("expression") or each["license"].get("id") or each["license"].get("name")
        for each in component.get("licenses", [])
    ]
    free = str(metadata(component["name"]).json.get("license", "")).strip().partition("\n")[0]
    return ", ".join(named) or free or "not declared: see its files"


def _run(module: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
