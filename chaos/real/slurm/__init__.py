"""The executor of scenarios on a real Slurm (`executor: slurm`): jobs, what affects them, and what is recorded."""
