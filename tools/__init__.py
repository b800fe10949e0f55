"""Programs for those who work on ampaudit; none is installed with it."""
