"""What a dataset is: its manifest, schema, row groups and lengths, and how it is described and verified."""
