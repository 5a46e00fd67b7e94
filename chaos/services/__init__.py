"""Services and environment of a job under test: etcd, proxies and cables, S3, MLflow, nodes."""
