"""`python -m tests.rank_program WHAT RANK`: one rank of the work that `run_ranks` has pickled."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    of_rank, arguments = pickle.loads(Path(sys.argv[1]).read_bytes())
    of_rank(int(sys.argv[2]), *arguments)
