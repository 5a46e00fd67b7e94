"""Communication of tensors on accelerators: by NCCL, under the same rules as gloo, or through host memory."""
