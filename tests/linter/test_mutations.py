"""Changes of correct scripts: a mistake is found in most, and a harmless change in none."""

from __future__ import annotations

import ast

import pytest

from tests.linter.corpora import read_set
from tests.linter.examples import lint
from tests.linter.mutations import HARMLESS, MISTAKES, Mutation

# two sets by different authors, of which the first has the older styles
SCRIPTS = [script for name in ("correct-sixth", "correct-tenth") for script in read_set(name)]


def mutated(mutation: Mutation) -> list[tuple[str, str]]:
    """Return name and text of each script in which the mutation finds its place."""
    texts = []
    for script in SCRIPTS:
        tree = ast.parse(script.source)
        if mutation(tree):
            texts.append((script.name, ast.unparse(ast.fix_missing_locations(tree))))
    return texts


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_in_most_scripts(name: str) -> None:
    mutation, share = MISTAKES[name]
    texts = mutated(mutation)
    missed = [script for script, text in texts if not lint(text).findings]
    assert len(texts) >= 10
    found = len(texts) - len(missed)
    assert found >= share * len(texts), f"found in {found} of {len(texts)}, not in {missed}"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_stays_correct_is_not_reported(name: str) -> None:
    texts = mutated(HARMLESS[name])
    assert texts
    alarms = {script: [(f.code, f.line) for f in lint(text).findings] for script, text in texts}
    assert not {script: found for script, found in alarms.items() if found}
