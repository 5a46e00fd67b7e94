"""Rows of tokens as tasks read them: columns, labels and metadata as tensors, token ids, tokenizers."""
