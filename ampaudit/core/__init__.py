"""What every other package uses: errors, number formats, sites, text and files."""

from __future__ import annotations
