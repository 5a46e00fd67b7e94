"""A save beside training: staging, the thread that writes, receipts of parts, and giving up."""
