"""One node of a job: options from the command line and scheduler, the agent, exit codes."""
