"""A bad pair never touches what serves, and no pair is checked twice."""

from __future__ import annotations

from typing import Any

import pytest

from draftline_operator.constants import REVISION_LABEL
from draftline_operator.models.kinds import CONFIG_MAP, DEPLOYMENT, JOB, SPECULATIVE_DEPLOYMENT
from draftline_operator.models.names import pair_record_name
from draftline_operator.planning.gate import RETRY_SECONDS
from support.kubelet import FITS, MISMATCH
from support.operator_world import NAME, World
from support.speculative_deployments import PAIR

OTHER_DRAFT = {"draft": {"model": {"uri": "pvc://models/other-draft"}}}


async def template(world: World) -> dict[str, Any]:
    deployment = await world.existing(DEPLOYMENT)
    found: dict[str, Any] = deployment["spec"]["template"]
    return found


async def test_a_pair_that_does_not_fit_leaves_the_old_pods_untouched(world: World) -> None:
    await world.create()
    await world.settle()
    before = await world.existing(DEPLOYMENT)
    world.kubelet.preflight = MISMATCH
    await world.change(OTHER_DRAFT)
    await world.settle()
    after = await world.existing(DEPLOYMENT)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    conditions = await world.conditions()
    assert conditions["ModelsVerified"] == ("False", "PairMismatch")
    assert conditions["Ready"] == ("False", "PairMismatch")
    assert conditions["Available"] == ("True", "PodsAvailable")


async def test_a_repaired_pair_is_checked_and_rolled_out(world: World) -> None:
    world.kubelet.preflight = MISMATCH
    await world.create()
    await world.settle()
    assert await world.get(DEPLOYMENT) is None
    world.kubelet.preflight = FITS
    await world.change(OTHER_DRAFT)
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"
    assert await world.client.list(JOB, world.namespace) == []


async def test_the_old_pods_serve_and_scale_while_a_new_pair_is_checked(world: World) -> None:
    await world.create()
    await world.settle()
    before = await template(world)
    world.kubelet.is_preflight_held = True
    await world.change({**OTHER_DRAFT, "replicas": 3})
    await world.settle()
    assert await template(world) == before
    assert (await world.existing(DEPLOYMENT))["spec"]["replicas"] == 3
    conditions = await world.conditions()
    assert conditions["Ready"] == ("True", "PodsAvailable")
    assert conditions["Progressing"] == ("True", "VerifyingModels")
    world.kubelet.is_preflight_held = False
    await world.settle()
    after = await template(world)
    assert after["metadata"]["labels"][REVISION_LABEL] != before["metadata"]["labels"][REVISION_LABEL]


async def test_going_back_to_a_pair_that_was_checked_needs_no_job(world: World) -> None:
    await world.create()
    await world.settle()
    await world.change(OTHER_DRAFT)
    await world.settle()
    await world.change({"draft": PAIR["draft"]})
    _, writes = await world.reconcile()
    assert not [write for write in writes if write[1] == "Job"]
    assert [write for write in writes if write[1] == "Deployment"]


async def test_two_resources_of_one_pair_share_a_verdict_that_outlives_the_first(world: World) -> None:
    await world.create()
    await world.settle()
    await world.create(name="second")
    _, writes = await world.reconcile("second")
    assert not [write for write in writes if write[1] == "Job"]
    await world.settle(NAME, "second")
    revision = (await template(world))["metadata"]["labels"][REVISION_LABEL]
    record = await world.existing(CONFIG_MAP, pair_record_name(revision))
    assert {owner["name"] for owner in record["metadata"]["ownerReferences"]} == {NAME, "second"}
    await world.client.delete(SPECULATIVE_DEPLOYMENT, world.namespace, NAME)

    async def is_first_gone() -> bool:
        return await world.get(DEPLOYMENT) is None

    await world.until(is_first_gone, seconds=30)
    assert await world.get(CONFIG_MAP, pair_record_name(revision)) is not None
    assert (await world.conditions("second"))["Ready"][0] == "True"


async def test_a_second_resource_waits_for_the_first_ones_job(world: World) -> None:
    world.kubelet.is_preflight_held = True
    await world.create()
    await world.reconcile()
    await world.create(name="second")
    outcome, _ = await world.reconcile("second")
    assert len(await world.client.list(JOB, world.namespace)) == 1
    assert outcome.requeue_after is not None
    assert (await world.conditions("second"))["ModelsVerified"] == ("Unknown", "PreflightRunning")
    world.kubelet.is_preflight_held = False
    await world.settle(NAME, "second")
    assert (await world.conditions("second"))["Ready"][0] == "True"


async def test_a_verdict_that_was_not_recorded_yet_is_awaited(world: World) -> None:
    await world.create()
    await world.reconcile()

    async def is_checked() -> bool:
        await world.kubelet.step()
        (job,) = await world.client.list(JOB, world.namespace)
        return any(c["type"] == "Complete" for c in job["status"].get("conditions", ()))

    await world.until(is_checked, seconds=30)
    await world.create(name="second")
    await world.reconcile("second")
    assert len(await world.client.list(JOB, world.namespace)) == 1
    assert (await world.conditions("second"))["ModelsVerified"] == ("Unknown", "PreflightRunning")
    await world.settle(NAME, "second")
    assert (await world.conditions("second"))["Ready"][0] == "True"


async def test_a_failure_that_may_pass_is_tried_again_after_a_while_and_not_before(world: World) -> None:
    world.kubelet.preflight = {"error": {"reason": "FetchFailed", "message": "the hub is away"}}
    await world.create()
    await world.settle()
    assert (await world.conditions())["ModelsVerified"] == ("False", "FetchFailed")
    outcome, writes = await world.reconcile()
    assert writes == []
    assert outcome.requeue_after is not None
    assert outcome.requeue_after > RETRY_SECONDS / 2
    world.kubelet.preflight = FITS
    world.seconds_ahead = RETRY_SECONDS + 1
    await world.reconcile()
    world.seconds_ahead = 0
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"


async def test_deleting_a_failed_job_repeats_the_check(world: World) -> None:
    world.kubelet.preflight = MISMATCH
    await world.create()
    await world.settle()
    (job,) = await world.client.list(JOB, world.namespace)
    world.kubelet.preflight = FITS
    await world.client.delete(JOB, world.namespace, job["metadata"]["name"])
    await world.settle()
    assert (await world.conditions())["Ready"][0] == "True"


@pytest.mark.parametrize("message", ["no JSON at all", "{}x"])
async def test_a_spoiled_record_is_written_anew(world: World, message: str) -> None:
    await world.create()
    await world.settle()
    revision = (await template(world))["metadata"]["labels"][REVISION_LABEL]
    record = pair_record_name(revision)
    before = await world.existing(CONFIG_MAP, record)
    await world.client.patch(CONFIG_MAP, world.namespace, record, {"data": {"result.json": message}})
    await world.settle()
    assert (await world.existing(CONFIG_MAP, record))["data"] == before["data"]
    assert (await world.conditions())["Ready"][0] == "True"
