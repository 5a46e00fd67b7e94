"""Parquet files as stored: footers, sources, and presigned requests to S3."""
