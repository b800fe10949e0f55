"""Rule files with mistakes, or that mean harm: an error with file, line, column and what to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from ampaudit.cli.program import main
from ampaudit.core.errors import PolicyError
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.policy import load, load_file, load_policy
from tests.support.clock import soon
from tests.support.rule_file import GOOD

WHY = "    reason: range\n    why: so.\n    source: this test\n"


def rule(text: str) -> str:
    return GOOD + text + WHY


def written(tmp_path: Path, text: str, name: str = "mine") -> Path:
    path = tmp_path / f"{name}.yaml"
    path.write_text(text)
    return path


MISTAKES = {
    "unknown key": (
        GOOD.replace("reason: speed", "reasons: speed"),
        r"14:5: unknown key 'rules\.1\.reasons'",
    ),
    "unknown cast": (
        GOOD.replace("cast: float32", "cast: float16"),
        r"6:11: rules\.0\.cast: Input should be",
    ),
    "unknown dtype": (
        GOOD.replace("[float16]", "[float8]"),
        r"12:20: rules\.1\.when\.dtype\.0: .*'bfloat16'",
    ),
    "unknown op": (GOOD.replace("[linear]", "[linaer]"), r"11:18: ATen has no op 'linaer'"),
    "no default overload": (GOOD.replace("[linear]", "[softmax]"), r"11:18: ATen has no op 'softmax'"),
    "unknown vocabulary": (
        GOOD.replace("title", "vocabulary: onx\ntitle"),
        r"2:13: unknown vocabulary 'onx'",
    ),
    "op of another vocabulary": (
        GOOD.replace("title", "vocabulary: onnx\ntitle").replace("[linear]", "[Gem]"),
        r"12:18: the vocabulary 'onnx' has no op 'Gem'",
    ),
    "duplicate id": (GOOD.replace("id: linear", "id: head"), r"10:9: duplicate rule id 'head'"),
    "conflict": (
        rule("  - id: again\n    match: {op: [linear]}\n    when: {dtype: [float16]}\n    cast: float32\n"),
        r"18:17: conflict: linear is float32 here and lower in rule 'linear'",
    ),
    "never matches": (
        rule("  - id: again\n    match: {op: [linear]}\n    when: {dtype: [float16]}\n    cast: lower\n"),
        r"18:12: rule 'again' can never match",
    ),
    "behind a rule about everything": (
        GOOD.replace('match: {layer: ["head*"]}', "match: {}"),
        r"11:12: rule 'linear' can never match: rule 'head'",
    ),
    "no number": (
        rule("  - id: deep\n    when: {depth: {min: 5, max: 4}}\n    cast: float32\n"),
        r"18:19: rules\.2\.when\.depth: no number lies between 5 and 4",
    ),
    "unknown argument": (
        rule(
            "  - id: a\n    match: {op: [softmax.int]}\n"
            "    when: {arguments: {dims: {equals: 1}}}\n    cast: lower\n"
        ),
        r"19:30: no op of this rule has an argument 'dims'; did you mean 'dim'",
    ),
    "empty test": (
        rule(
            "  - id: a\n    match: {op: [softmax.int]}\n    when: {arguments: {dim: {}}}\n    cast: lower\n"
        ),
        r"19:29: .*give at least one of equals",
    ),
    "measured rule that lowers": (
        rule("  - id: a\n    when: {evidence: {output_peak: {below: 1}}}\n    cast: lower\n"),
        r"19:11: a measured rule may only raise the precision",
    ),
    "color without a graph": (
        rule("  - id: a\n    match: {op: [exp]}\n    cast: deny\n"),
        r"19:11: rule 'a' looks at neighbors: that needs 'level: graph'",
    ),
    "no dtype argument": (
        rule("  - id: a\n    match: {op: [exp]}\n    cast: set-dtype\n"),
        r"19:11: exp has no argument 'dtype'",
    ),
    "look-around regex": (
        rule("  - id: a\n    match: {layer_regex: ['(?=x)']}\n    cast: lower\n"),
        r"18:26: '\(\?=x\)' is not a pattern of RE2",
    ),
    "bad version": (
        rule("  - id: a\n    match: {op: [exp]}\n    when: {versions: {torch: new}}\n    cast: lower\n"),
        r"19:30: 'new' is not a version condition",
    ),
    "unknown scale": (GOOD.replace("title", "loss_scale: torhc\ntitle"), r"2:13: unknown loss-scale profile"),
    "unknown parent": (
        GOOD.replace("title", "extends: [torch-cud]\ntitle"),
        r"2:11: unknown policy 'torch-cud'",
    ),
    "unknown drop": (
        GOOD.replace("title", "extends: [half]\ndrop: [x]\ntitle"),
        r"3:8: no inherited rule has the id 'x'",
    ),
    "clip without storage": (
        GOOD.replace("title", "weights: {clip: {max_finite: 1, min_positive: 0}}\ntitle"),
        r"2:17: weights are clipped when they are stored",
    ),
    "key twice": (
        GOOD.replace("title: a test", "title: a test\ntitle: b"),
        r"3:1: key 'title' is given twice",
    ),
    "alias": (GOOD.replace("rules:", "rules: &a\n  - *a\n#"), r"4:5: YAML aliases"),
    "tag": ("!!python/object/apply:os.system ['true']", r"1:1: YAML tags"),
    "tab": (GOOD.replace("    match: {op", "\tmatch: {op"), r"11:1: not valid YAML"),
    "unclosed": (GOOD.replace("[linear]", "[linear"), r":\d+:\d+: not valid YAML"),
    "not a mapping": ("- a\n- b\n", r"1:1: a rule file is a mapping"),
    "empty": ("", r"a rule file is a mapping|not valid YAML"),
    "a date for a word": (GOOD.replace("name: ", "2001-02-30: x\nname: "), r"1:1: a key must be a word"),
    "merge key": (GOOD.replace("title", "<<: {autocast: true}\ntitle"), r"2:1: a key must be a word"),
    "number without digits": (GOOD.replace("title: a test", "title: 0x_"), r"2:8: not valid YAML"),
    "control character": (GOOD.replace("title: a test", "title: a \0"), r"2:10: a control character"),
    "list without entries": (GOOD.replace("[linear]", "[]"), r"11:12: .*op is empty, which no op matches"),
    "no library": (GOOD.replace("[linear]", '["::x"]'), r"11:18: ATen has no op '::x'"),
    "no evidence": (
        rule("  - id: a\n    when: {evidence: {}}\n    cast: float32\n"),
        r"18:22: .*give at least one of weight_peak",
    ),
    "a value of what is unset": (
        rule(
            "  - id: a\n    match: {op: [softmax.int]}\n"
            "    when: {arguments: {dim: {unset: true, equals: 1}}}\n    cast: lower\n"
        ),
        r"19:29: .*an argument that is unset has no value",
    ),
    "in nothing": (
        rule(
            "  - id: a\n    match: {op: [softmax.int]}\n"
            "    when: {arguments: {dim: {in: []}}}\n    cast: lower\n"
        ),
        r"19:29: .*no value is in an empty list",
    ),
    "clamp to NaN": (rule("  - id: a\n    cast: lower\n    clamp: .nan\n"), r"19:12: .*finite"),
    "clamp below 0": (rule("  - id: a\n    cast: lower\n    clamp: -1\n"), r"19:12: .*than 0"),
    "infinite scale": (
        GOOD.replace("title", "loss_scale: {init: .inf}\ntitle"),
        r"2:20: loss_scale\.init: Input should be a finite number or 'caller'",
    ),
    "scale of nothing": (GOOD.replace("title", "loss_scale: {init: 0}\ntitle"), r"2:20: loss_scale\.init"),
    "limits the wrong way round": (
        GOOD.replace("title", "loss_scale: {min: 4, max: 2}\ntitle"),
        r"2:13: loss_scale: min is larger than max",
    ),
    "a number that is true": (
        GOOD.replace("title", "loss_scale: {interval: true}\ntitle"),
        r"2:24: loss_scale\.interval: .*valid integer",
    ),
    "a count that is true": (
        GOOD.replace("title", "loss_scale: {hysteresis: true}\ntitle"),
        r"2:26: loss_scale\.hysteresis: .*valid integer",
    ),
    "a number as text": (
        GOOD.replace("title", "loss_scale: {growth: '2'}\ntitle"),
        r"2:22: loss_scale\.growth: .*valid number",
    ),
    "no list": (GOOD.replace("[linear]", "linear"), r"11:17: rules\.1\.match\.op: Input should be a list"),
    "no mapping": (GOOD.replace("title", "weights: 3\ntitle"), r"2:10: weights: Input should be a mapping"),
    "half an interval": (
        GOOD.replace("title", "loss_scale: {interval: 1.5}\ntitle"),
        r"2:24: loss_scale\.interval: .*valid integer",
    ),
    "a list as attribute": (
        GOOD.replace("{op: [linear]}", "{attributes: {stride: [1, 1]}}"),
        r"11:34: rules\.1\.match\.attributes\.stride: .*boolean or a valid integer",
    ),
    "missing parent": (GOOD.replace("title", "extends: [no.yaml]\ntitle"), r"2:11: there is no file"),
    "NaN": (
        rule("  - id: deep\n    when: {depth: {min: .nan}}\n    cast: float32\n"),
        r"18:25: rules\.2\.when\.depth\.min",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_located(tmp_path: Path, name: str) -> None:
    text, message = MISTAKES[name]
    path = written(tmp_path, text)
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy(str(path))
    assert "mine.yaml" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", MISTAKES)
def test_the_command_says_it_in_one_line(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, MISTAKES[name][0])
    result = CliRunner().invoke(main, ["rules", "validate", str(path)])
    assert isinstance(result.exception, PolicyError)
    assert len(str(result.exception).splitlines()) == 2


def test_near_misses_are_suggested(tmp_path: Path) -> None:
    for wrong, near in (("linaer", "linear"), ("softmax", "softmax.int"), ("@softmx", "@softmax")):
        path = written(tmp_path, GOOD.replace("[linear]", f'["{wrong}"]'))
        with pytest.raises(PolicyError) as caught:
            load_policy(str(path))
        assert f"did you mean '{near}'" in caught.value.hint


def test_parents_that_are_shared_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four files of each generation extend all of the next: 4^7 paths lead to the last one."""
    reads: list[Path] = []
    read = load.read_yaml
    monkeypatch.setattr(load, "read_yaml", lambda path: reads.append(path) or read(path))
    for age in range(7):
        parents = "".join(f"\n  - p{age + 1}{n}.yaml" for n in range(4)) if age < 6 else " [half]"
        for n in range(4):
            written(tmp_path, f"name: p{age}{n}\ntitle: t\nextends:{parents}\n", f"p{age}{n}")
    loaded = load_file(str(tmp_path / "p00.yaml"))
    assert loaded.file.weights.storage == "lower"
    assert len([path for path in reads if path.parent == tmp_path]) == 1 + 6 * 4


def test_a_policy_that_extends_itself(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        text = GOOD.replace("name: mine", f"name: {name}").replace(
            "title", f"extends: [{parent}.yaml]\ntitle"
        )
        written(tmp_path, text, name)
    with pytest.raises(PolicyError, match=r"c\.yaml:2:11: a policy extends itself: a -> b -> c -> a"):
        load_policy(str(tmp_path / "a.yaml"))


def test_a_regex_that_would_backtrack_for_ever_does_not(tmp_path: Path) -> None:
    from ampaudit.policy import OpFacts

    path = written(tmp_path, GOOD.replace('layer: ["head*"]', "layer_regex: ['^(a+)+$']"))
    rules = load_policy(str(path))
    with soon():
        assert rules.decide(OpFacts("relu", "a" * 5000 + "b", "float16")).rule is None


def test_a_file_without_suffix_does_not_hide_a_shipped_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half").write_text(GOOD)
    (tmp_path / "mine").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    assert load_policy("half").file.weights.storage == "lower"
    assert load_policy("./half").name == load_policy("mine").name != "half"


def test_a_pattern_that_is_none_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GOOD.replace('layer: ["head*"]', "layer_regex: ['(é']"))
    with pytest.raises(PolicyError, match="missing"):
        load_policy(str(path))
    assert capfd.readouterr() == ("", "")  # RE2's own log goes past Python


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b]\n",
        "name: " + "[" * 100_000,
        "name:\n" + "".join(" " * depth + "- \n" for depth in range(1, 500)),
        "? " * 50_000,
        "#" * (10 << 20),
        "name: \x00",
        "name: 1" + ":1" * 300_000,
        "version: 0x" + "f" * 9000,
        "version: 1" + ":1" * 3000 + ".5",
        "? [" + "1, " * 100_000 + "]\n: 1",
    ],
    ids=[
        *("bomb", "brackets", "indentation", "question marks", "10 MB", "control character"),
        *(
            "a number to base 60",
            "more digits than can be printed",
            "a fraction to base 60",
            "a list as a key",
        ),
    ],
)
def test_hostile_files_are_refused_at_once(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with soon(), pytest.raises(PolicyError) as caught:
        load_policy(str(path))
    assert len(caught.value.args[0]) <= MAX_MESSAGE
    assert caught.value.args[0].isprintable()


@pytest.mark.parametrize(
    "text",
    [
        f'"{"x" * 5000}": 1',
        '"\\e[31m\\u202e": 1',
        '{"\\e": 1, "\\e": 1}',
        "name: *" + "x" * 5000,
        "a: !" + "x" * 5000,
    ],
    ids=lambda text: text[:12],
)
def test_names_in_mistakes_are_short_and_escaped(tmp_path: Path, text: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(str(written(tmp_path, text)))
    assert len(caught.value.args[0]) <= MAX_MESSAGE
    assert caught.value.args[0].isprintable()


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    with pytest.raises(PolicyError, match="not a regular file"):
        load_policy(str(tmp_path / "fifo.yaml"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot read rule file"):
        load_policy(str(tmp_path / "none.yaml"))
    (tmp_path / "directory.yaml").mkdir()
    with pytest.raises(PolicyError, match="cannot read rule file"):
        load_policy(str(tmp_path / "directory.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\xff")
    with pytest.raises(PolicyError, match="not UTF-8"):
        load_policy(str(tmp_path / "latin.yaml"))


def test_suspicious_rules_are_warned_about(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        GOOD.replace('"head*"', '"^head.*$"')
        .replace("[linear]", '["mylib::swish"]')
        .replace("title", "extends: [torch-cuda]\ntitle")
        + "  - id: shadow\n    match: {op: [norm.Scalar, norm.ScalarOpt_dim]}\n    cast: float32\n"
        + WHY,
    )
    warnings = "\n".join(load_file(str(path)).warnings)
    assert "mine.yaml:6:12: the glob '^head.*$' looks like a regular expression" in warnings
    assert "mylib::swish belongs to another library" in warnings
    assert "the inherited rule 'torch-cuda/norm' can no longer match" in warnings
    result = CliRunner().invoke(main, ["rules", "validate", str(path)])
    assert result.exit_code == 0
    assert "valid" in result.stdout
    assert result.stderr.count("warning: ") == 3
