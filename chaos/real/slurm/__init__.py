"""The executor of scenarios on a real Slurm (`executor: slurm`): jobs, what befalls them, and what is recorded."""
