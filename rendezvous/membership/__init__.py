"""Members, terms and worlds: pure decisions, the store protocol they run over, and its twin in memory."""
