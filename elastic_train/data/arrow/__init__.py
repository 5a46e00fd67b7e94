"""Arrow columns as arrays: gather rows by views, convert numbers, cut and pad lists."""
