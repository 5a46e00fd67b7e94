"""Test a user's own torchrun command under faults: watched from outside, judged by the log of a hook."""
