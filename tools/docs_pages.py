"""Generates pages of the documentation site from the code: API, checks, policies, schemas."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import ampaudit
from ampaudit.findings.pages import Page, all_pages
from ampaudit.findings.pages.page import command_of, family

ROOT = Path(__file__).resolve().parents[1]
# pages whose file is outside docs/, where people look for it first
OUTSIDE_DOCS = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "benchmarks.md": "benchmarks/README.md",
}


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every page that is not a file of ``docs/``, by its path in the site."""
    pages = {name: (ROOT / file).read_text(encoding="utf-8") for name, file in OUTSIDE_DOCS.items()}
    pages["api.md"] = api_page()
    pages["checks.md"] = checks_page(all_pages().values())
    pages |= {f"checks/{page.code}.md": check_page(page) for page in all_pages().values()}
    pages["policies.md"] = policies_page()
    for kind, title in (("report", "Report schema"), ("rules", "Rule file schema")):
        schema = json.loads((ROOT / "docs" / f"{kind}.schema.json").read_text(encoding="utf-8"))
        pages[f"{kind}-schema.md"] = schema_page(title, f"{kind}.schema.json", schema)
    return pages


def api_page() -> str:
    """Return a page with the signature and docstring of every public name, functions first."""
    names = [name for name in ampaudit.__all__ if not name.startswith("__")]
    functions = [name for name in names if inspect.isfunction(getattr(ampaudit, name))]
    groups = {"Functions": functions, "Classes": [name for name in names if name not in functions]}
    lines = ["# Python API", ""]
    lines += ["Import these names from `ampaudit`. Each is loaded on first use, so `import ampaudit`"]
    lines += ["does not import torch.", ""]
    for title, members in groups.items():
        lines += [f"## {title}", "", *(f"::: ampaudit.{name}\n" for name in sorted(members))]
    return "\n".join(lines)


def checks_page(checks: Iterable[Page]) -> str:
    """Return the table of all checks, by family, with links to their pages."""
    lines = [
        "# Checks",
        "",
        "Every finding has a code, and every code has a page with a bad and a good example.",
    ]
    lines += ["`ampaudit explain AMP106` prints the same page. The examples are the check's test: the check"]
    lines += ["must fire on the bad one and stay silent on the good one.", ""]
    last = ""
    for check in checks:
        if (title := family(check.code)) != last:
            last = title
            lines += [
                "",
                f"## {title[0].upper()}{title[1:]}",
                "",
                "| code | check | severity |",
                "|---|---|---|",
            ]
        lines.append(f"| [{check.code}](checks/{check.code}.md) | {check.title} | {check.severity} |")
    return "\n".join(lines) + "\n"


def check_page(check: Page) -> str:
    """Return the page of a check, with the options of its examples as command lines."""
    text = re.sub(r"^```python .*$", "```python", check.text, flags=re.M)
    bad, good = (command_of(check.code, example) for example in (check.bad, check.good))
    command = f"To see the finding, save the example as `model.py` and run `{bad}`."
    text = text.replace("\n## Good example", f"\n{command}\n\n## Good example")
    if good != bad:
        text = text.replace("\n## When to", f"\nFor this example, run `{good}`.\n\n## When to")
    return text


def policies_page() -> str:
    """Return a section for each shipped policy with its rules, and the loss-scale profiles."""
    lines = ["# Policies", ""]
    lines += [
        "These rule files are shipped, in `rules/` of the repository. `ampaudit rules show NAME` prints"
    ]
    lines += ["one with the rules that it inherits. [Write a policy](rules.md) explains the keys.", ""]
    for path in sorted((ROOT / "rules").glob("*.yaml")):
        lines += policy_section(yaml.safe_load(path.read_text(encoding="utf-8")))
    lines += ["## Loss-scale profiles", "", "| profile | system | scale | source |", "|---|---|---|---|"]
    text = (ROOT / "rules" / "profiles" / "loss-scale.yaml").read_text(encoding="utf-8")
    for name, profile in yaml.safe_load(text).items():
        scale = ", ".join(f"{key} {value}" for key, value in profile["scale"].items())
        lines.append(f"| `{name}` | {cell(profile['title'])} | {scale} | {cell(profile['source'])} |")
    return "\n".join(lines) + "\n"


def policy_section(policy: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one policy: its title, its settings, and a table of its own rules."""
    yield from (f"## `{policy['name']}`", "", f"{policy['title']}.", "")
    settings = {key: policy[key] for key in policy if key not in ("name", "title", "rules")}
    if settings:
        yield from ("```yaml", *(f"{key}: {flow(value)}" for key, value in settings.items()), "```", "")
    if rules := policy.get("rules"):
        yield from ("| rule | cast | reason | why |", "|---|---|---|---|")
        for rule in rules:
            why = f"{rule.get('why', '')} ({rule['source']})" if "source" in rule else rule.get("why", "")
            yield f"| `{rule['id']}` | `{rule['cast']}` | {rule.get('reason', '')} | {cell(why)} |"
        yield ""


def schema_page(title: str, name: str, schema: Mapping[str, Any]) -> str:
    """Return the fields of a JSON Schema as tables, one for each object."""
    objects = {schema["title"]: schema, **schema["$defs"]}
    lines = [
        f"# {title}",
        "",
        f"[`{name}`]({name}) as tables. Within a schema version, fields are added but never removed.",
        "",
    ]
    for heading, item in objects.items():
        summary, _, attributes = item.get("description", "").partition("\n\nAttributes:\n")
        meanings = dict(re.findall(r"^    (\w+): (.*(?:\n      +.*)*)", attributes, re.M))
        lines += [f"## {heading}", "", summary.replace("``", "`"), ""]
        if "enum" in item:
            lines += [f"One of {type_of(item)}.", ""]
        elif "properties" in item:
            lines += [*fields_table(item, meanings), ""]
    return "\n".join(lines)


def fields_table(item: Mapping[str, Any], meanings: Mapping[str, str]) -> Iterator[str]:
    """Yield the fields of an object as a table.

    ``meanings`` has the fields that the object's docstring describes; a field's own description goes first.
    """
    yield from ("| field | type | meaning |", "|---|---|---|")
    for field, value in item["properties"].items():
        meaning = value.get("description", meanings.get(field, ""))
        optional = "" if field in item.get("required", ()) else ", optional"
        yield f"| `{field}` | {type_of(value)}{optional} | {cell(meaning)} |"


def type_of(value: Mapping[str, Any]) -> str:
    """Return the type of a field in Markdown, with links to the objects that it holds."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in value:
        return " or ".join(type_of(part) for part in value["anyOf"])
    if "enum" in value:
        return ", ".join(f"`{word}`" for word in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    if value.get("type") == "array" and "items" in value:
        return f"list of {type_of(value['items'])}"
    return str(value.get("type", "any"))


def flow(value: object) -> str:
    """Return a value as YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").rstrip()


def cell(text: object) -> str:
    """Return a text as one cell of a Markdown table."""
    return " ".join(str(text).split()).replace("``", "`").replace("|", "\\|")
