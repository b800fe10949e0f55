"""The converted directory: what lies in it, how it is described, and how it is checked."""

from __future__ import annotations

from ampaudit.archive.manifest import Manifest, OutputRecord, read_manifest, write_manifest

__all__ = ["Manifest", "OutputRecord", "read_manifest", "write_manifest"]
