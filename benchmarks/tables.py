"""Writes the table of docs/bench.md from the dated results, between markers.

python -m benchmarks.tables
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from ampaudit.render.markdown import to_markdown
from ampaudit.report.documents import read_document
from benchmarks.options import parser

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NAME = "efficientnet_b0"
PAGES = (ROOT / "docs" / "bench.md",)


def table() -> str:
    """Return the table of the latest result of each kind of device, GPUs first."""
    found = {}
    for path in sorted(RESULTS.glob(f"*-{NAME}.json")):
        found[path.name.split("-")[3]] = path
    return "\n".join(f"{to_markdown(read_document(found[kind]))}\n" for kind in sorted(found, reverse=True))


def rewritten(text: str) -> str:
    begin, end = f"<!-- {NAME} -->", f"<!-- end of {NAME} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{table()}{end}", text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    for path in PAGES:
        text = rewritten(path.read_text(encoding="utf-8"))
        if options.smoke:
            print(text)
        else:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
