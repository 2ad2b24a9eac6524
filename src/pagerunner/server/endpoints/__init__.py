"""One file for each endpoint, or for a few that belong together."""
