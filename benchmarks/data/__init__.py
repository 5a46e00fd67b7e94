"""What reading costs: our loader beside its peers, from the local disk and from S3."""
