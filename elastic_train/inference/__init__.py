"""Use of a run's model after training: open a commit, evaluate, predict, export, generate."""
