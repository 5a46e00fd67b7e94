"""Arrow's columns as arrays: gathering rows by views, numbers, lists cut and padded."""
