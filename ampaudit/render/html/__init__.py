"""Renders a document as one HTML file."""
