"""Runs many audits and commands, and compares their documents with those of an earlier version of the code.

``python -m tools.replay record FOLDER`` before a change, ``python -m tools.replay compare FOLDER`` after.
"""
