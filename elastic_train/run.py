"""One process of a job from start to exit: set the machine up, open a session, train, tell how it ended, leave.

This is the one supervisor: every error ends here, in a message and an exit code.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from elastic_train import config as configuration
from elastic_train.assembly import open_session
from elastic_train.cli import explain
from elastic_train.config import Config
from elastic_train.errors import ElasticTrainError, PeerLostError, Preempted
from elastic_train.preemption import LeaveRequest
from elastic_train.progress import flush_streams
from elastic_train.result import write_result
from elastic_train.session import Session
from elastic_train.trainer import Outcome, train
from rendezvous.errors import RendezvousError
from rendezvous.orphans import die_with_parent


def run(path: Path, overrides: Sequence[str]) -> int:
    """Train as the configuration says and return the process's exit code; under torchrun, one of its ranks."""
    started_at = time.time()
    is_launched = "WORLD_SIZE" in os.environ
    if is_launched:
        die_with_parent()
    leave = LeaveRequest()
    try:
        config = configuration.load(path, environ=os.environ, arguments=overrides)
        code = _train(config, leave, started_at)
    except ElasticTrainError as error:
        sys.stderr.write(explain(error) + "\n")
        code = error.exit_code
    except RendezvousError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 1
    except Exception:  # noqa: BLE001 - the supervisor: an unforeseen error must still be told and end the process
        traceback.print_exc()
        code = 1
    flush_streams()
    if is_launched:
        os._exit(code)  # a stuck collective's thread must not keep the process from leaving
    return code


def _train(config: Config, leave: LeaveRequest, started_at: float) -> int:
    session = open_session(config, leave, started_at)
    try:
        outcome = train(session)
        return _finish(session, outcome)
    except PeerLostError:
        raise  # the job goes on in the next world, and with it the tracker's run
    except Exception:
        session.close(status="FAILED")
        raise


def _finish(session: Session, outcome: Outcome) -> int:
    """Write the result, end the tracker's run truthfully, and leave the group in good order."""
    write_result(session, outcome.value)
    session.close(status="FINISHED" if outcome is Outcome.DONE else "KILLED")
    session.world.group.close()  # nobody leaves while another still waits for an answer
    return 0 if outcome is Outcome.DONE else Preempted.exit_code
