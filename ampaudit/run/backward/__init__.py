"""Computes gradients of the mixed graph and of FP32, op by op, and suitable loss scales."""
