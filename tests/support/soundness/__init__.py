"""Random torch programs, and the check that what they compute lies within the bounds of a proof."""
