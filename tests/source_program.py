"""`python -m tests.source_program FILE ARGS…`: run a program's text as `python -c` does, for `run_source`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    source = Path(sys.argv[1]).read_text()
    sys.argv = ["-c", *sys.argv[2:]]
    exec(compile(source, "<source>", "exec"), {"__name__": "__main__"})
