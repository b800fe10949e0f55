"""Findings of every command, and the page of documentation of each code."""
