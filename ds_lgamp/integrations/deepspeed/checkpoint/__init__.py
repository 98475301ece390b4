"""Training runs of the engine on disk, and those of stock DeepSpeed."""
