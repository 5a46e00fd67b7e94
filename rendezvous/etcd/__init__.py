"""The membership store over etcd v3: connection, watch, options, and a server for demos and tests."""
