"""Divides the batches of an audit among processes and machines, and joins their records."""
