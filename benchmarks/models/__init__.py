"""Real models in the trainer, compared with plain PyTorch, transformers and DDP."""
