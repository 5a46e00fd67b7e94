"""The configuration: its schema, the sources it is read from, and YAML 1.2's numbers."""
