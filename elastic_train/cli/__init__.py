"""The command line: train and launch, checkpoints, datasets, audit."""
