"""Tests of elastic_train.planning."""
