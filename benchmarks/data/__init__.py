"""The cost of reading data: our loader compared with peers, from the local disk and from S3."""
