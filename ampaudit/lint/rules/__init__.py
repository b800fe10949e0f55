"""Rules about what happened where: over the events of one root, of a whole file, or over its syntax alone."""

from __future__ import annotations
