"""Shares the batches of an audit among processes and machines, and joins what they record."""
