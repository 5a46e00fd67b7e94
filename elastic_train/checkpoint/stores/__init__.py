"""Where commits are stored: local folders and object stores, with checksums and deadlines."""
