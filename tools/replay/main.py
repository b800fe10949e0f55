"""The command line: writes the documents of all cases to a folder, or compares them with those in it."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path

from tools.replay.folder import compare, record
from tools.replay.processes import outcomes_of
from tools.replay.table import all_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if all documents are the same, or were recorded without a crash."""
    started, options = time.perf_counter(), _parser().parse_args(arguments)
    cases = [case for case in all_cases() if re.search(options.only, case.name)]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    folder = options.folder.resolve()
    outcomes = list(outcomes_of(cases))
    documents = {outcome.name: outcome.text for outcome in outcomes}
    if options.command == "record":
        record(folder, documents, options.only)
        crashes = [outcome for outcome in outcomes if outcome.crashed]
        for outcome in crashes:
            print(f"crashed: {outcome.name}: {outcome.text.strip()}")
        good = not crashes
    else:
        good = compare(folder, documents, options.only)
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.seconds)[: options.durations]:
        print(f"{outcome.seconds:6.2f} s  {outcome.name}")
    print(f"{len(documents)} documents in {time.perf_counter() - started:.0f} s")
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=__doc__)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        default="",
        help="run the cases whose name matches this regular expression",
    )
    parser.add_argument("--list", action="store_true", help="only print the names of the cases")
    parser.add_argument("--durations", metavar="N", type=int, default=0, help="print the N slowest cases")
    return parser
