"""One file per op. Each has a torch twin with the signature of its GPU kernel; the twin is also the CPU path."""
