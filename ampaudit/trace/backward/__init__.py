"""Traces custom backwards: of autograd functions, and hooks on tensors."""
