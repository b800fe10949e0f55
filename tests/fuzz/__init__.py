"""Mutated and crafted inputs: whatever a file holds, a command accepts it or refuses it."""
