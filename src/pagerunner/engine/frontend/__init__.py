"""The text side of an engine: prompts to requests, updates to outputs, many readers at once."""
