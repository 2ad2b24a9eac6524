"""The `pagerunner` command: one module per verb, loaded only when that verb runs."""
