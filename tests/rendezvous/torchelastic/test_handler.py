"""The handler as TorchElastic uses it: registration, a fresh store for every round, orphans."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler, handler_registry

from rendezvous import EtcdServer, OptionError, context
from rendezvous.process_table import is_alive
from rendezvous.torchelastic.entry_point import create_handler, load
from rendezvous.torchelastic.restart_handler import EtcdRendezvousHandler
from tests.conftest import PATIENCE_S, eventually


def make(etcd: EtcdServer, run_id: str, **conf: str) -> EtcdRendezvousHandler:
    options = {"last_call_s": "0.1", "timeout": f"{PATIENCE_S}", "ttl": f"{PATIENCE_S}", **conf}
    handler = create_handler(RendezvousParameters("etcd", etcd.endpoint, run_id, 1, 2, **options))
    assert isinstance(handler, EtcdRendezvousHandler)
    return handler


def test_load_takes_the_name_and_may_be_repeated() -> None:
    """After `load` the registry makes our handler for `etcd`; torchrun may register the same creator again."""
    (ours,) = [point for point in entry_points(group="torchrun.handlers") if point.name == "etcd"]
    assert ours.load() is load
    handler_registry.register("etcd", load())
    with pytest.raises(OptionError, match="not HOST:PORT"):
        get_rendezvous_handler(RendezvousParameters("etcd", "host:x", "id", 1, 1))


@pytest.mark.slow
def test_our_backend_is_registered_whatever_is_imported_first() -> None:
    """Torch's registry imports our entry point in the middle of its own import, and swallows its errors."""
    first = [f"rendezvous.torchelastic.{name}" for name in ("entry_point", "live_handler", "restart_agent")]
    source = f"""
import importlib, os, sys, torch
assert not any(name.startswith(("torch.distributed.elastic", "rendezvous")) for name in sys.modules)
for module in {first}:
    if os.fork() == 0:
        importlib.import_module(module)
        from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
        print(registry._registry["etcd"].__module__)
        sys.exit()
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["rendezvous.torchelastic.entry_point"] * 3
    assert "Exception while registering" not in ended.stderr


@pytest.mark.slow
def test_every_round_has_a_fresh_store(etcd: EtcdServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round's store entries are absent from the next round's store, and the term grows."""
    monkeypatch.setenv("ELASTIC_RENDEZVOUS", "")
    handler = make(etcd, run_id)
    first = handler.next_rendezvous()
    first.store.set("key", "old")
    given = context()
    again = handler.next_rendezvous()
    assert not again.store.check(["key"])
    later = context()
    assert given is not None and later is not None
    assert (given.term, given.cause, later.term, later.cause) == (1, "start", 2, "restart")
    assert given.endpoints == (etcd.endpoint,) and given.joined_at <= given.sealed_at
    assert handler.use_agent_store and handler.get_backend() == "etcd" and handler.get_run_id() == run_id
    handler.shutdown()


@pytest.mark.slow
def test_a_closed_job_lets_late_joiners_go(etcd: EtcdServer, run_id: str) -> None:
    """A handler of a finished job raises the graceful exit."""
    handler, late = make(etcd, run_id), make(etcd, run_id)
    handler.next_rendezvous()
    handler.set_closed()
    with pytest.raises(RendezvousGracefulExitError, match="is done"):
        late.next_rendezvous()
    assert late.is_closed()
    handler.shutdown()
    late.shutdown()


@pytest.mark.slow
def test_children_die_with_their_parent(tmp_path: Path) -> None:
    """The kernel kills a program started through `bound_command` when its parent dies."""
    source = (
        "import subprocess, sys, time; from rendezvous.orphans import bound_command;"
        "child = subprocess.Popen(bound_command('sleep', '600')); print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = Path("/proc") / parent.stdout.readline().strip()
    eventually(lambda: (child / "comm").read_text() == "sleep\n", "the child has become the program")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not is_alive(int(child.name)), "the child is gone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--port", "70000", "--port must be 1 to 65535, not 70000"), ("--data-dir", "/proc/none", "error: [Errno 2]")],
)
def test_the_demo_server_refuses_bad_options_in_a_sentence(option: str, value: str, said: str) -> None:
    """Python's own traceback came instead."""
    command = [sys.executable, "-m", "rendezvous", option, value]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2) and said in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
def test_the_demo_server_runs_by_itself() -> None:
    """`python -m rendezvous` prints its endpoint, and leaves no process or file when it is asked to stop."""
    server = subprocess.Popen([sys.executable, "-m", "rendezvous"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("127.0.0.1:")
    server.terminate()
    assert server.wait(timeout=PATIENCE_S) == 0
    server.stdout.close()


def test_an_uncaught_error_of_the_rendezvous_or_a_worker_is_its_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever runs torchrun did not write its frames; all other errors are shown as before."""
    passed = list[type[BaseException]]()
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: passed.append(kind))
    load()
    load()
    for error in (
        OptionError("--rdzv_conf: unknown key"),
        RendezvousTimeoutError("too few nodes"),
        OSError(),
        ChildFailedError("train.py", {0: ProcessFailure(0, 34, 2, "")}),
    ):
        sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err
    assert said.startswith("error: --rdzv_conf: unknown key\nerror: too few nodes\nerror: \n====")
    assert ("train.py FAILED" in said, "Traceback" in said) == (True, False)
    assert passed == [OSError]
