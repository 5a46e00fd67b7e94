"""Tests of what a run's folder tells."""
