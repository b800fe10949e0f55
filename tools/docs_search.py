"""Checks that the search of the built site leads from common questions to the guides that answer them.

Material's search runs in the browser. This module rebuilds it from the same index with lunr's port to
Python: each word is the prefix of a term, a page outranks a section, and so does a match of more words.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.pipeline import Pipeline
from lunr.stop_word_filter import WORDS, stop_word_filter

SHOWN = 5  # results that are visible without scrolling
# questions, with the guides that answer them
QUESTIONS = {
    "ignore a finding": "scanning checking linting fixing",
    "suppress a warning": "scanning checking linting",
    "loss scale": "training",
    "gradients overflow": "training",
    "keep a layer in float32": "fixing tuning rules",
    "which GPUs support bfloat16": "scanning",
    "convert a checkpoint": "converting",
    "convert a model to fp16": "converting",
    "fail the build": "checking",
    "GitHub Actions": "checking",
    "pre-commit": "linting checking",
    "accept known findings": "checking",
    "random inputs": "scanning",
    "model without example inputs": "scanning",
    "write a policy": "rules",
    "ONNX file": "onnx",
    "several GPUs": "parallel",
    "larger than memory": "parallel scanning",
    "how accurate is the output": "scanning reports tuning",
    "read a report": "reports",
    "diffusion sampler": "recording scanning",
    "Lightning": "training linting",
    "notebook": "linting scanning",
    "speed of float16": "bench",
}
_TAG = re.compile(r"<[^>]+>")


class SiteSearch:
    """The search of a built site."""

    def __init__(self, index: Path) -> None:
        data = json.loads(index.read_text(encoding="utf-8"))
        builder, pipeline = Builder(), Pipeline()
        pipeline.add(stop_word_filter)
        builder.pipeline, builder.search_pipeline = pipeline, Pipeline()
        builder.b(0)
        builder.ref("location")
        for name, field in data["config"]["fields"].items():
            builder.field(name, boost=field["boost"])
        self._pages: set[str] = set()
        for item in data["docs"]:
            page, section, _ = item["location"].partition("#")
            if not section:
                self._pages.add(page)
            plain = {name: _TAG.sub(" ", item.get(name, "")) for name in ("title", "text")}
            builder.add({"location": item["location"], "tags": "", **plain}, {"boost": item.get("boost", 1)})
        self._index = builder.build()

    def pages(self, question: str) -> list[str]:
        """Return the pages that match, the best first."""
        words = [word.lower() for word in re.split(r"[\s\-]+", question)]
        scores: dict[str, float] = {}
        for result in self._index.search(" ".join(f"{word}*" for word in words)):
            score = self._weight(result, words) * result["score"]
            page = result["ref"].partition("#")[0]
            scores[page] = max(scores.get(page, 0.0), score)
        return sorted(scores, key=lambda page: -scores[page])

    def _weight(self, result: Any, words: list[str]) -> float:
        terms = list(result["match_data"].metadata)
        matched = [any(term.startswith(word) for term in terms) for word in words if word not in WORDS]
        share = sum(matched) / len(matched) if matched else 0.0
        return float(1 + ((result["ref"] in self._pages) + share) ** 2)


def unanswered(index: Path) -> list[str]:
    """Return a line for each question whose guides are not among the first results."""
    search, missed = SiteSearch(index), []
    for question, guides in QUESTIONS.items():
        first = search.pages(question)[:SHOWN]
        if not any(f"{guide}.html" in first for guide in guides.split()):
            missed.append(f"{question!r} finds {', '.join(first)}, but not {guides}")
    return missed
