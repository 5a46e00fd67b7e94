"""The command line: train and launch, checkpoints, datasets, audit, and the output that they share."""
