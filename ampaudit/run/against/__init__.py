"""Compares two models: which ops correspond, and where the second computes something else."""
