"""Prints what people ask an assistant, a prompt a line: what the demo's draft head learns to answer.

    python server/demo/head_prompts.py > prompts.txt
    draftline-server distill --target ... --prompts prompts.txt ...

Always the same ones in the same order. A head drafts best for what it has seen the like of, so users of other
targets should give prompts of their own traffic.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import yaml

MATERIAL = Path(__file__).with_suffix(".yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description="prints prompts, one a line")
    parser.add_argument("--number", type=int, default=6000, metavar="N", help="default: %(default)s")
    for prompt in make_prompts(parser.parse_args().number):
        print(prompt)


def make_prompts(number: int) -> list[str]:
    """Different ones, of all kinds; fewer where there are no more."""
    material = yaml.safe_load(MATERIAL.read_text())
    kinds, weights = material["phrases"], [kind["weight"] for kind in material["phrases"]]
    source = random.Random(0)
    prompts: dict[str, None] = {}
    for _ in range(10 * number):
        if len(prompts) == number:
            break
        (kind,) = source.choices(kinds, weights)
        prompts[source.choice(kind["of"]).format_map(_draw(source, material["lists"]))] = None
    return list(prompts)


def _draw(source: random.Random, lists: dict[str, list[str]]) -> dict[str, Any]:
    """Something for every gap that a phrase may have."""
    topic, other = source.sample(lists["topic"], 2)
    drawn: dict[str, Any] = {name: source.choice(items) for name, items in lists.items()}
    return drawn | {
        "topic": topic,
        "other": other,
        "large": source.randint(20, 400),
        "small": source.randint(2, 19),
    }


if __name__ == "__main__":
    main()
