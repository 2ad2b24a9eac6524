"""Config readers: config.json of every family to a ModelConfig. Torch-free, so that memory can be planned from a config alone."""
