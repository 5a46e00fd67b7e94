"""TorchElastic's side: entry point, handlers and agents of the modes `restart` and `live`."""
