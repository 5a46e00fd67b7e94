"""The cost of saves and loads compared with torch.save and torch.distributed.checkpoint."""
