"""Communication within a cell (replica group), while its ranks compute a lane together."""
