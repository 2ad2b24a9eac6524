"""Memory below the device's: where else pages lie, and how they come from there. It knows pages by group and key, and no tensors."""
