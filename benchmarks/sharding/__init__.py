"""Costs and savings of sharded state, compared with replicated state, FSDP2 and dcp."""
