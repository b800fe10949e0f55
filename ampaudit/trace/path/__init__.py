"""Traces a model along the path that given inputs take, where its Python code depends on values."""
