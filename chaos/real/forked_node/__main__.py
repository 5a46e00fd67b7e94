"""`python -m chaos.real.forked_node ARGS…`: torchrun, in a fork that shows its node's mark."""

import os
import sys

from torch.distributed.run import main

from chaos.real.forked_node.mark import show
from chaos.services.torchrun_node import MARK

if __name__ == "__main__":
    show(MARK, os.environ[MARK])
    main(sys.argv[1:])
