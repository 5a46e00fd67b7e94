"""What sharded state costs and saves, beside the replicated one, FSDP2 and dcp."""
