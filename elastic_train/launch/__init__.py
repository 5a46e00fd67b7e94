"""A node of a job: options from the command line and the scheduler, the agent, exit codes."""
