"""A model's units (its blocks, and the rest): their execution order, recomputation and compilation."""
