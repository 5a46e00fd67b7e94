"""Members, terms and worlds: pure decisions, the store protocol they use, and an in-memory store."""
