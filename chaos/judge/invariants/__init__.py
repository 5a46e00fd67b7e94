"""What must hold of every run: one module for each group of invariants."""
