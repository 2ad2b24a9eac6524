"""Page memory: what layers keep, how bytes are cut into pages, who holds which page. Free of torch."""
