"""One module per kind of document, with the view that all formats render."""
