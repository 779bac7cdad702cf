"""The pods of a resource. Whatever changes them rolls every user's workload when the operator is upgraded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.renders import assert_all_compared, assert_known
from support.speculative_deployments import FULL, MINIMAL, PAIR, deployment, resource

RENDERS = Path(__file__).parent / "renders" / "pods"
SPECS: dict[str, dict[str, Any]] = {"minimal": MINIMAL, "pair": PAIR, "full": FULL}


@pytest.mark.parametrize("name", SPECS)
def test_a_new_version_leaves_the_pods_of_old_resources_alone(name: str) -> None:
    template = deployment(resource(SPECS[name]))["spec"]["template"]
    assert_known(RENDERS / f"{name}.yaml", yaml.safe_dump(template, sort_keys=True, width=1000))


def test_there_is_no_render_that_nobody_compares() -> None:
    assert_all_compared(RENDERS, SPECS)
