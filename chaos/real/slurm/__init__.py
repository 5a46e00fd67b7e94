"""The executor of scenarios on a real Slurm (`executor: slurm`): jobs, faults and records."""
