"""Rendezvous' errors as errors of the trainer: the kind decides the exit code, the message stays."""

from __future__ import annotations

import subprocess
import sys

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
