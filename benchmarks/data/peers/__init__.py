"""Loaders of other libraries behind one small protocol, each in a module that imports nothing of ours.

They run in a virtual environment of their own (`benchmarks.data` makes it), over the same rows: a column `input_ids`
(lists of int32, at least one) and `label`. Every loader gives batches of token ids padded to the longest row, int64,
and the labels, shuffled over the whole dataset as its documentation says.
"""
