"""What the rounding of each value does to the outputs, and runs with any choice of precisions."""
