"""Starting an engine: configuration resolved, the machine looked at, the parts put together, what the start took."""
