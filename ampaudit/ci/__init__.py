"""``ampaudit check``, ``assert_safe`` and the pytest plugin."""

from __future__ import annotations
