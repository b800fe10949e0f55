"""Traces custom backwards: those of autograd functions, and hooks on tensors."""
