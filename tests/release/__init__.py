"""Release artefacts of a version: its files, their dependencies, and the licences of these."""
