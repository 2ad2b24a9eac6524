"""The model runner (L6): what a step plan becomes on a device."""
