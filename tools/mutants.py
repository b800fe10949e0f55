"""Mutation testing: counts the mutants of the package that the tests of the changed line kill.

``python -m tools.mutants select MUTANTS --coverage DATA`` chooses mutants at random from the lines that the
tests execute, equally many from each package. A mutant changes a comparison, a number or a truth value,
removes a statement, or swaps two arguments.

``python -m tools.mutants run MUTANTS --coverage DATA --times TIMES --out RESULTS`` applies the mutants one by
one to a copy of the repository, and runs the tests that execute the line, the cheapest first, until one
fails. coverage.py writes DATA, with a context per test; ``tests.support.measured`` writes TIMES.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import pytest

from tools.measured import PACKAGE, executed, read_times

ROOT = Path(__file__).resolve().parents[1]
_OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_GRACE_SECONDS = 60.0  # for pytest's own start
_CONTROL_SECONDS = 600.0
_NO_WARNING = "ignore::pytest.PytestAssertRewriteWarning"  # about the preloaded modules
# the fork server imports these packages once, instead of each run
_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload(
    [
        "torch.export",
        "transformers.modeling_utils",
        "onnx",
        "onnxruntime",
        "pytest",
        "scipy.optimize",
    ]
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: its line, its kind, the changed expression before and after, and the file's new text."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    text: str


# ---- choosing


@dataclass(frozen=True, slots=True)
class _Place:
    """A node that may be changed, by its position in ``ast.walk`` of its file."""

    file: str
    number: int


def _places(file: str, lines: set[int]) -> dict[str, list[_Place]]:
    """Return the places on the given lines, by the kind of change."""
    places: dict[str, list[_Place]] = defaultdict(list)
    for number, node in enumerate(ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))):
        if getattr(node, "lineno", None) in lines and (change := _changed(node)) is not None:
            places[change[0]].append(_Place(file, number))
    return places


def _mutant(place: _Place) -> Mutant | None:
    source = (ROOT / place.file).read_text(encoding="utf-8")
    node = next(itertools.islice(ast.walk(ast.parse(source)), place.number, None))
    assert isinstance(node, ast.expr | ast.stmt)
    change = _changed(node)
    assert change is not None
    text = _replaced(source, node, change[1])
    if text is None:
        return None
    before = ast.get_source_segment(source, node) or ""
    return Mutant(place.file, node.lineno, change[0], before, ast.unparse(change[1]), text)


def _changed(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return the kind of the change and the changed node; ``None`` if this node is not mutated."""
    match node:
        case ast.Compare(ops=[operator]):
            return "comparison", ast.Compare(node.left, [_OTHER[type(operator)]()], node.comparators)
        case ast.Constant(value=bool(value)):
            return "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return "constant", ast.Constant(value + 1)
        case ast.Call(args=[first, second, *others]) if not {ast.Starred} & {type(first), type(second)}:
            return "arguments", ast.Call(node.func, [second, first, *others], node.keywords)
        case ast.Expr(value=ast.Constant() | ast.Yield()):
            return None
        case ast.Assign() | ast.AugAssign() | ast.Expr():
            return "statement", ast.Pass()
    return None


def _replaced(source: str, node: ast.AST, changed: ast.AST) -> str | None:
    """Return the source with a node replaced; ``None`` if that does not parse or changes nothing."""
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.splitlines(keepends=True)
    first, last = lines[node.lineno - 1].encode(), lines[node.end_lineno - 1].encode()
    head, tail = first[: node.col_offset].decode(), last[node.end_col_offset :].decode()
    new = ast.unparse(changed)
    if isinstance(changed, ast.expr):
        new = f"({new})" if not isinstance(changed, ast.Constant | ast.Call) else new
    text = "".join([*lines[: node.lineno - 1], head, new, tail, *lines[node.end_lineno :]])
    try:
        return text if ast.dump(ast.parse(text)) != ast.dump(ast.parse(source)) else None
    except SyntaxError:  # a number in an f-string, for one
        return None


def select(covered: Covered, count: int, seed: int) -> list[Mutant]:
    """Choose mutants at random, equally many from each package."""
    rng = random.Random(seed)
    packages: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / PACKAGE).glob("*/**/*.py")):
        file = str(path.relative_to(ROOT))
        packages[file.split("/")[1]].append(file)
    selected: list[Mutant] = []
    for number, (_, files) in enumerate(sorted(packages.items())):
        share = count * (number + 1) // len(packages) - count * number // len(packages)
        by_kind: dict[str, list[_Place]] = defaultdict(list)
        for file in files:
            for kind, places in _places(file, covered.lines_in_functions(file)).items():
                by_kind[kind] += places
        kinds = itertools.cycle(sorted(by_kind))
        while share:
            mutant = _mutant(rng.choice(by_kind[next(kinds)]))
            if mutant is not None and mutant not in selected:
                selected.append(mutant)
                share -= 1
    return selected


class Covered:
    """Which tests execute which lines."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._tests: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file, test, bits in executed(files):
            for line in range(bits.bit_length()):
                if bits >> line & 1:
                    self._tests[file][line].add(test)

    def lines_in_functions(self, file: str) -> set[int]:
        """Return the lines that tests execute, without those that only imports execute."""
        return {line for line, tests in self._tests[file].items() if tests - {""}}

    def tests(self, file: str, line: int) -> set[str]:
        """Return the tests that execute a line."""
        return self._tests[file][line] - {""}


# ---- running


def run(
    mutants: Sequence[Mutant], covered: Covered, times: dict[str, float], budget: float, jobs: int
) -> list[dict]:
    """Run the tests of each mutant; return its verdict, and the test that kills it."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copies: Queue[Path] = Queue()
        for number in range(jobs):
            tree = Path(place) / str(number)
            shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "dist", ".*_cache"))
            copies.put(tree)
        control = sorted({min(covered.tests(mutant.file, mutant.line)) for mutant in mutants})
        verdict, why = _outcome(tree, control, _CONTROL_SECONDS)
        if verdict != "survived":
            raise SystemExit(f"without a mutant, tests fail: {why}")

        def judge(mutant: Mutant) -> dict:
            tree = copies.get()
            try:
                return _judged(mutant, tree, covered, times, budget)
            finally:
                copies.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            results = []
            for result in pool.map(judge, mutants):
                results.append(result)
                where = f"{result['file']}:{result['line']}"
                print(f"{len(results):4} {result['verdict']:9} {where} {result['kind']}", flush=True)
            return results


def _judged(mutant: Mutant, tree: Path, covered: Covered, times: dict[str, float], budget: float) -> dict:
    known = sorted((times[test], test) for test in covered.tests(mutant.file, mutant.line) if test in times)
    tests, spent = [], 0.0
    for seconds, test in known:
        if spent + seconds <= budget or not tests:
            tests.append(test)
            spent += seconds
    target = tree / mutant.file
    original = target.read_bytes()
    target.write_text(mutant.text, encoding="utf-8")
    start = time.monotonic()
    try:
        verdict, test = _outcome(tree, tests, 4 * spent + _GRACE_SECONDS)
    finally:
        target.write_bytes(original)
    described = {key: value for key, value in asdict(mutant).items() if key != "text"}
    return described | {
        "verdict": verdict,
        "test": test,
        "tests": len(tests),
        "covering": len(known),
        "seconds": round(time.monotonic() - start, 1),
    }


def _outcome(tree: Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """Run tests until one fails; return the verdict and the failure."""
    if not tests:
        return "uncovered", ""
    log = tree / "mutant.log"
    process = _FORKING.Process(target=_run_tests, args=(tree, tests, log))
    process.start()
    process.join(timeout)
    if process.is_alive():
        process.kill()
        process.join()
        return "timeout", ""
    if process.exitcode == pytest.ExitCode.OK:
        return "survived", ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return "found", failed[0] if failed else "\n".join(lines[-5:])


def _run_tests(tree: Path, tests: Sequence[str], log: Path) -> None:
    """Run tests of a copy of the repository; runs in a child of the fork server."""
    with log.open("wb") as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    words = ["-x", "-q", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider", "-W", _NO_WARNING]
    code = pytest.main([*words, *tests])
    sys.stdout.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["select", "run"])
    parser.add_argument("mutants", type=Path)
    parser.add_argument("--coverage", type=Path, nargs="+", required=True)
    parser.add_argument("--times", type=Path, nargs="+", default=[])
    parser.add_argument("--count", type=int, default=136)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    covered = Covered(options.coverage)
    if options.action == "select":
        selected = select(covered, options.count, options.seed)
        options.mutants.write_text(json.dumps([asdict(mutant) for mutant in selected], indent=1))
        print(f"{len(selected)} mutants")
        return
    mutants = [Mutant(**item) for item in json.loads(options.mutants.read_text())]
    results = run(mutants, covered, read_times(options.times), options.budget, options.jobs)
    counts: dict[str, int] = defaultdict(int)
    for result in results:
        counts[result["verdict"]] += 1
    print(dict(counts))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
