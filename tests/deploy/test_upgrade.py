"""A live job is upgraded node by node: releases of a series train together, and no step is lost on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest

from chaos.judge.evidence.run_files import collect
from rendezvous import EtcdServer
from tests.conftest import ROOT, environ_of
from tests.deploy.jobs import until_ranks
from tests.elastic_train.training.live.test_live import (
    etcd,
    history,
    undisturbed,
    weights,
    write_config,
)

pytestmark = pytest.mark.deploy
__all__ = ["etcd", "undisturbed"]
PATIENT = ("--hang-timeout-s", "200", "--grace-s", "100")
"""A node that gets no processor for some seconds is neither lost nor hung: there are just the worlds of the test."""
STEPS = 120
FROM_TAG = "+tag"
"""Marker by which files of the tagged package differ from those of the installed one."""
SERIES = ".".join(version("elastic-train").split(".")[:2])


def this_release(folder: Path) -> Path:
    """Copy the sources to where a release is installed."""
    sources = folder / "site-packages"
    for name in ("elastic_train", "rendezvous", "chaos", "tests"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "deploy"))
    describe(sources, version("elastic-train"))
    return sources


def newer_release(folder: Path) -> Path:
    """Copy the sources as the next release of the series, with what others do not know: a field of members, a key, and
    a task's message."""
    sources = this_release(folder)
    field, key = "    missed: tuple[str, ...] = ()\n", "    ema_decay: float | None = Field(default=None, gt=0, lt=1)\n"
    for name, old, new in (
        ("rendezvous/membership/records.py", field, f'{field}    rack: str = "of a newer release"\n'),
        ("elastic_train/config/recipe.py", key, f"    warm_restarts: int = 0\n{key}"),
        ("elastic_train/tasks/text_classifier.py", "needed only for data", "of use for data"),
    ):
        text = (sources / name).read_text()
        assert text.count(old) == 1
        (sources / name).write_text(text.replace(old, new))
    describe(sources, f"{SERIES}.99")
    return sources


def last_release(folder: Path) -> Path:
    """Return the package as the last tag of its series has it, with the tasks of today, which are a user's.

    Where nothing is tagged yet, the commit before this one stands for a release, by a tag in a clone.
    """
    clone, sources = folder / "clone", folder / "last" / "site-packages"
    if git(ROOT, "rev-parse", "HEAD") is None:
        pytest.skip("no history here: a release is looked for among git's tags")
    assert git(ROOT, "clone", "--quiet", "--no-checkout", str(ROOT), str(clone)) is not None
    tag = git(clone, "describe", "--tags", "--abbrev=0", f"--match=v{SERIES}.*")
    if tag is None:
        before = git(clone, "rev-parse", "--verify", "--quiet", "HEAD~1") or "HEAD"  # a clone may have one commit alone
        tag = f"v{SERIES}.0"
        assert git(clone, "tag", tag, before) is not None
        assert git(clone, "describe", "--tags", "--abbrev=0", f"--match=v{SERIES}.*", tag) == tag
    sources.mkdir(parents=True)
    packed = folder / "release.tar"
    assert git(clone, "archive", f"--output={packed}", tag, "elastic_train", "rendezvous", "deploy") is not None
    subprocess.run(["tar", "-x", "-f", str(packed), "-C", str(sources)], check=True)
    for name in ("chaos", "tests"):
        shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__", "deploy"))
    describe(sources, tag.removeprefix("v") + FROM_TAG)
    return sources


def git(folder: Path, *words: str) -> str | None:
    """Return what git says; None if it fails."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout.strip()


def describe(sources: Path, version: str) -> None:
    """Let the sources be those of a version."""
    described = sources / f"elastic_train-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(f"Metadata-Version: 2.4\nName: elastic-train\nVersion: {version}\n")


@contextmanager
def node_of(folder: Path, sources: Path, etcd: EtcdServer, config: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a node of a release, which leaves within the context."""
    node = [
        "launch",
        config,
        *PATIENT,
        "--ttl-s",
        "60",
        "--ranks",
        "1",
        "--nodes",
        "1:2",
        "--endpoint",
        etcd.endpoint,
        "--id",
        folder.name,
    ]
    command = [sys.executable, "-m", "elastic_train.cli.main", *node]
    with (folder / f"{sources.parent.name}.log").open("ab") as log:
        environ = environ_of(PYTHONPATH=str(sources))
        process = subprocess.Popen(command, cwd=sources, env=environ, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_live_job_is_upgraded_and_taken_back_without_a_lost_step(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """The new one is taken in, the old one leaves, and an old one joins again: both orders of ranks, one hash."""
    this, newer = this_release(tmp_path / "this"), newer_release(tmp_path / "newer")
    done, run = tmp_path / "done", tmp_path / "run"
    config = write_config(tmp_path, rows, STEPS, lane_ms=500.0, until=done)
    with node_of(tmp_path, this, etcd, config) as old:
        term, _ = until_ranks(run, 1)
        with node_of(tmp_path, newer, etcd, config) as new:
            term, _ = until_ranks(run, 2, above=term)
            left(old, tmp_path / "this.log")
            term, _ = until_ranks(run, 1, above=term)
            with node_of(tmp_path, this, etcd, config) as back:
                until_ranks(run, 2, above=term)
                left(new, tmp_path / "newer.log")
                done.touch()
                assert back.wait(400) == 0, (tmp_path / "this.log").read_text()
    assert weights(collect(run)) == undisturbed(STEPS)
    applied = Counter(
        step for step, _ in {(line["step"], line["term"]) for line in history(run) if line["op"] == "step"}
    )
    assert sorted(applied.items()) == [(step, 1) for step in range(1, STEPS + 1)], "each step once, in one world"
    sizes = {line["term"]: line["world"] for line in history(run) if line["op"] == "form"}
    assert [size for _, size in sorted(sizes.items())] == [1, 2, 1, 2, 1]
    records = [json.loads(path.read_text()) for path in sorted((run / "commits").iterdir())]
    assert {record["versions"]["elastic-train"] for record in records} <= {f"{SERIES}.99", version("elastic-train")}


def test_a_run_of_the_last_release_goes_on_with_this_one(
    tmp_path: Path, rows: Path, etcd: EtcdServer, undisturbed: Callable[[int], object]
) -> None:
    """Begun by the last tag, it is left and resumed by this source, which then takes a node of the tag in, as in an
    upgrade node by node. No step is lost, and the hash is that of a run of this source alone."""
    last, this = last_release(tmp_path), this_release(tmp_path / "this")
    done, run = tmp_path / "done", tmp_path / "run"
    config = write_config(tmp_path, rows, STEPS, lane_ms=500.0, until=done)
    with node_of(tmp_path, last, etcd, config) as old:
        term, _ = until_ranks(run, 1)
        left(old, tmp_path / "last.log")
    newest = json.loads(max((run / "commits").iterdir()).read_text())
    assert newest["versions"]["elastic-train"].endswith(FROM_TAG), "the tag's package has written it"
    with node_of(tmp_path, this, etcd, config) as job:
        term, _ = until_ranks(run, 1, above=term)
        with node_of(tmp_path, last, etcd, config) as old:
            term, _ = until_ranks(run, 2, above=term)
            left(old, tmp_path / "last.log")
        until_ranks(run, 1, above=term)
        done.touch()
        assert job.wait(400) == 0, (tmp_path / "this.log").read_text()
    assert weights(collect(run)) == undisturbed(STEPS)
    applied = {(line["step"], line["term"]) for line in history(run) if line["op"] == "step"}
    assert sorted(step for step, _ in applied) == list(range(1, STEPS + 1)), "each step once, in one world"


def left(node: subprocess.Popen[bytes], log: Path) -> None:
    """Ask a node to leave, and wait until it has."""
    node.send_signal(signal.SIGUSR1)
    assert node.wait(400) == 75, log.read_text()
