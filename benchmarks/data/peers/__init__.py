"""Loaders of other libraries behind one small protocol, in modules that do not import our package.

They run in their own virtual environment (`benchmarks.data` creates it), over the same rows: the columns `input_ids`
(lists of int32, at least one) and `label`. Every loader gives batches of token ids padded to the longest row, int64,
and the labels, shuffled over the whole dataset as its documentation says.
"""
