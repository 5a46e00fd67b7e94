"""The TorchElastic integration: entry point, handlers and agents of the modes `restart` and `live`."""
