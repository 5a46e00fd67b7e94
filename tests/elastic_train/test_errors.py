"""Rendezvous' errors as errors of the trainer: the kind decides the exit code, the message stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_train import errors
from elastic_train.errors import ElasticTrainError, translated
from rendezvous import errors as theirs


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (theirs.OptionError("a", "b"), errors.ConfigError, 2),
        (theirs.FencedError("a\nb"), errors.FencedError, 1),
        (theirs.TooFewNodesError("a\nb"), errors.TooFewNodesError, 77),
        (theirs.StoppedWaiting("a\nb"), errors.Preempted, 75),
        (theirs.StoreUnavailableError("a\nb"), errors.StorageError, 1),
        (theirs.StoreRefusedError("a\nb"), errors.StorageError, 1),
        (theirs.ServerError("a\nb"), ElasticTrainError, 1),
    ],
)
def test_an_error_of_rendezvous_keeps_its_message_and_gets_an_exit_code(
    raised: theirs.RendezvousError, kind: type[ElasticTrainError], code: int
) -> None:
    with pytest.raises(ElasticTrainError) as caught, translated():
        raise raised
    assert (type(caught.value), caught.value.exit_code, str(caught.value)) == (kind, code, "a\nb")


@pytest.mark.parametrize("kind", [errors.ConfigError, errors.FencedError, errors.TooFewNodesError, errors.Preempted])
def test_a_translated_error_is_not_translated_again(kind: type[ElasticTrainError]) -> None:
    """Translating again what has been translated changes nothing, though it is an error of rendezvous as well."""
    raised = kind("why")
    assert isinstance(raised, theirs.RendezvousError)
    with pytest.raises(kind) as caught, translated():
        raise raised
    assert caught.value is raised


@pytest.mark.slow
def test_importing_the_errors_does_not_import_the_etcd_client() -> None:
    source = "import sys, elastic_train.errors; assert not {'grpc', 'pyetcd', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True)


UNCAUGHT = """
import atexit, sys
import elastic_train as et
atexit.register(print, "left in good order")
et.load_config(sys.argv[1]) if sys.argv[1] else 1 / 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "path", "code", "said", "error"),
    [
        ({}, "missing.yaml", 2, "left in good order\n", "error: missing.yaml: cannot be read"),
        ({"WORLD_SIZE": "2"}, "missing.yaml", 2, "", "error: missing.yaml: cannot be read"),
        ({}, "", 1, "left in good order\n", "Traceback"),
    ],
    ids=["a script", "a rank", "another error"],
)
def test_an_error_that_a_script_does_not_catch_ends_it_with_its_sentence_and_code(
    environ: dict[str, str], path: str, code: int, said: str, error: str
) -> None:
    """It ended with 1 and a traceback. A rank ends at once, since a thread may be stuck in a collective."""
    ended = subprocess.run(
        [sys.executable, "-c", UNCAUGHT, path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environ},
    )
    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr
    assert ended.stderr.startswith(error)
    assert ("Traceback" in ended.stderr) == (code == 1)


def test_a_traceback_shows_the_users_frames_and_what_they_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frames that lead to them are hidden unless asked for, and all are shown of an error that is ours."""
    source = tmp_path / "task.py"
    source.write_text("import json\ndef loss(call): return call(lambda: json.loads('{'))\n")
    exec(compile(source.read_text(), str(source), "exec"), names := dict[str, Any]())

    def shown(call: Callable[[], object]) -> list[str]:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whichever
            errors.show(error)
        said = capsys.readouterr().err
        return [line.split('"')[1].rpartition("/")[2] for line in said.splitlines() if line.startswith("  File")]

    def fail() -> None:
        with translated():
            names["loss"](lambda decode: decode())

    monkeypatch.setattr(errors, "_NOT_THE_USERS", (*errors._NOT_THE_USERS, __file__))
    assert shown(fail) == ["task.py", "task.py", "__init__.py", "decoder.py", "decoder.py"]
    assert shown(lambda: 1 // 0) == ["test_errors.py", "test_errors.py"]
    monkeypatch.setenv(errors.TRACEBACK, "full")
    assert shown(fail)[:3] == ["test_errors.py", "test_errors.py", "task.py"]
