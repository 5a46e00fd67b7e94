"""What surrounds a job: etcd, proxies and cables, S3, MLflow, nodes."""
