"""Real models in the trainer, beside plain PyTorch, transformers and DDP."""
