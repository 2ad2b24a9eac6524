"""A worker is one rank of an engine: a device with a model, its pages and a runner."""
