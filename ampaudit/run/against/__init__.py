"""Two models side by side: which ops correspond, and where the second computes something else."""
