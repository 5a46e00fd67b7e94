"""Real models in the trainer, compared with plain PyTorch."""
