"""Tests of phases, detection, pages and traces."""
