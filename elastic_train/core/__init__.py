"""The pure core: sample order, lanes, coverage and lineage. No torch, no I/O, no clock."""
