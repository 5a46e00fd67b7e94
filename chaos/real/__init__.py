"""Run a job of real processes on this machine, and inject faults into it."""
