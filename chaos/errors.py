"""Every error of this package.

ChaosError             1
├── ScenarioError      2   a scenario cannot be used as written; all problems at once
└── RunError           1   the job under test could not be driven to its end
"""

from __future__ import annotations


class ChaosError(Exception):
    """An error meant for the user; `exit_code` is what the process ends with."""

    exit_code = 1


class ScenarioError(ChaosError):
    """One or more things in a scenario are wrong; all of them are in `problems`."""

    exit_code = 2

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class RunError(ChaosError):
    """The job did not come to the point where the next fault was due, or not to its end."""
