"""`python -m elastic_train CONFIG [--key value ...]`: the target of torchrun, and a world of one without it.

Before its imports, which take seconds, it announces its work, and listens for requests to leave.
"""

from elastic_train.launch import departure
from rendezvous.agent.worker_end import announce
from rendezvous.open_files import fill_standard_streams

fill_standard_streams()
announce()
departure.listen()

from elastic_train.cli.main import main_train  # noqa: E402

if __name__ == "__main__":
    main_train()
