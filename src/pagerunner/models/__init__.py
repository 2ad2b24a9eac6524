"""Model families, one file each; `configs/` reads config.json, `checkpoint/` builds and fills models."""
