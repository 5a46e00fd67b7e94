"""What saves and loads cost, beside torch.save and torch.distributed.checkpoint."""
