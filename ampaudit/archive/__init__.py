"""The converted directory: what lies in it, how it is described, and how it is checked."""

from __future__ import annotations

from ampaudit.archive.manifest import MANIFEST, Manifest, OutputRecord, read_manifest, write_manifest

__all__ = ["MANIFEST", "Manifest", "OutputRecord", "read_manifest", "write_manifest"]
