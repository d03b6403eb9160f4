"""What a method costs: fidelity against the dense cache, and memory, both as allocated and as projected."""
