"""Measures the effect of rounding each value on the outputs, and runs any choice of precisions."""
