"""The files of a commit: torch.distributed.checkpoint's format, its layout, and digests of weights."""
