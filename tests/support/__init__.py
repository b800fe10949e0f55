"""Models, oracles and helpers that several test modules share."""
