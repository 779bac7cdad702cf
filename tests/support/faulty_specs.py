"""Specs that must be refused: by the API server's schema and by the operator, which reads the same."""

from __future__ import annotations

from typing import Any

from support.speculative_deployments import MINIMAL, PAIR, changed

FAULTS: list[tuple[str, dict[str, Any], str]] = [
    # (id, spec, the whole message, or its beginning where it ends with "…")
    ("empty", {}, "spec.target: Field required"),
    ("no-model", {"target": {}}, "spec.target.model: Field required"),
    ("no-uri", {"target": {"model": {}}}, "spec.target.model.uri: Field required"),
    ("unknown-section", changed(MINIMAL, rollout={}), "spec.rollout: Extra inputs are not permitted"),
    (
        "unknown-field",
        changed(MINIMAL, serving__httpPort=8080),
        "spec.serving.httpPort: Extra inputs are not permitted",
    ),
    ("python-name", changed(MINIMAL, target__tensorParallelSize="1"), "spec.target.tensorParallelSize: …"),
    ("text-for-a-number", changed(MINIMAL, replicas="2"), "spec.replicas: Input should be a valid integer"),
    ("number-for-a-flag", changed(MINIMAL, speculation__enabled=1), "spec.speculation.enabled: …"),
    ("fraction", changed(MINIMAL, replicas=1.5), "spec.replicas: …"),
    ("negative-replicas", changed(MINIMAL, replicas=-1), "spec.replicas: …"),
    ("negative-k", changed(MINIMAL, speculation__numSpeculativeTokens=-1), "spec.speculation.numSpec…"),
    ("large-k", changed(MINIMAL, speculation__numSpeculativeTokens=65), "spec.speculation.numSpec…"),
    ("unknown-dtype", changed(MINIMAL, target__dtype="int8"), "spec.target.dtype: …"),
    ("unknown-method", changed(MINIMAL, speculation__methods=["Eagle"]), "spec.speculation.methods[0]: …"),
    ("no-methods", changed(MINIMAL, speculation__methods=[]), "spec.speculation.methods: …"),
    (
        "method-twice",
        changed(MINIMAL, speculation__methods=["NGram", "NGram"]),
        "spec.speculation.methods: names a method twice",
    ),
    ("tensor-parallel", changed(MINIMAL, target__tensorParallelSize=2), "spec.target.tensorParallelSize: …"),
    ("draft-elsewhere", changed(PAIR, draft__placement="Pod"), "spec.draft.placement: …"),
    ("image-with-a-space", changed(MINIMAL, image="draftline server"), "spec.image: …"),
    ("image-with-a-line", changed(MINIMAL, image="draftline\n"), "spec.image: …"),
    ("long-image", changed(MINIMAL, image="a" * 1_000_000), "spec.image: …"),
    (
        "accelerator-without-vendor",
        changed(MINIMAL, accelerator={"resourceName": "gpu"}),
        "spec.accelerator.…",
    ),
    (
        "more-accelerators-than-ranks",
        changed(MINIMAL, accelerator={"count": 4}),
        "spec.accelerator.count: must equal target.tensorParallelSize",
    ),
    (
        "two-caches",
        changed(MINIMAL, modelCache={"persistentVolumeClaim": "a", "emptyDir": {}}),
        "spec.modelCache: set only one of persistentVolumeClaim and emptyDir",
    ),
    (
        "drain-shorter-than-requests",
        changed(MINIMAL, disruption__drainTimeoutSeconds=119),
        "spec.disruption.drainTimeoutSeconds: must not be below serving.requestTimeoutSeconds: …",
    ),
    (
        "nothing-drafts",
        changed(MINIMAL, speculation__methods=["DraftModel"]),
        "spec.speculation.methods: names only DraftModel, but there is no draft; …",
    ),
    (
        "more-seats-than-tokens",
        changed(MINIMAL, serving__maxBatchedTokens=31),
        "spec.serving.maxBatchedTokens: must not be below maxConcurrentRequests: …",
    ),
    (
        "draft-longer-than-a-step",
        changed(
            MINIMAL,
            serving={"maxBatchedTokens": 16, "maxConcurrentRequests": 8},
            speculation={"numSpeculativeTokens": 16},
        ),
        "spec.speculation.numSpeculativeTokens: must be below serving.maxBatchedTokens",
    ),
    (
        "replica-bounds",
        changed(MINIMAL, autoscaling={"minReplicas": 3, "maxReplicas": 2}),
        "spec.autoscaling.minReplicas: must not exceed maxReplicas",
    ),
    (
        "watermarks",
        changed(
            MINIMAL, autoscaling={"maxReplicas": 2, "queueDepth": {"highWatermark": 4, "lowWatermark": 4}}
        ),
        "spec.autoscaling.queueDepth.lowWatermark: must be below highWatermark",
    ),
    ("no-budget", changed(MINIMAL, disruption={"maxUnavailable": 0}), "spec.disruption.maxUnavailable: …"),
    (
        "bad-quantity",
        changed(MINIMAL, serving__kvCacheMemory="1.5 Gi"),
        "spec.serving.kvCacheMemory: '1.5 Gi' is …",
    ),
    ("no-memory", changed(MINIMAL, accelerator={"memory": 0}), "spec.accelerator.memory: must be above 0"),
    (
        "negative-memory",
        changed(MINIMAL, accelerator={"memory": "-1Gi"}),
        "spec.accelerator.memory: must be …",
    ),
    ("memory-is-a-flag", changed(MINIMAL, accelerator={"memory": True}), "spec.accelerator.memory: …"),
    ("bad-digest", changed(MINIMAL, target__model__digest="sha256:12"), "spec.target.model.digest: …"),
    (
        "revision-like-a-flag",
        changed(MINIMAL, target__model__revision="--out"),
        "spec.target.model.revision: …",
    ),
    (
        "credentials-of-a-claim",
        changed(MINIMAL, target__model__credentialsSecretRef={"name": "hub"}),
        "spec.target.model.credentialsSecretRef: is only for models that are fetched: hf:// and s3://",
    ),
    ("label-key", changed(MINIMAL, podTemplate__labels={"a b": "c"}), "spec.podTemplate.labels.a b…"),
    ("label-value", changed(MINIMAL, podTemplate__labels={"a": "b c"}), "spec.podTemplate.labels.a: …"),
    (
        "nameless-env",
        changed(MINIMAL, podTemplate__env=[{"value": "1"}]),
        "spec.podTemplate.env[0]: name is missing",
    ),
    (
        "nameless-volume",
        changed(MINIMAL, podTemplate__volumes=[{"name": "a"}, {"emptyDir": {}}]),
        "spec.podTemplate.volumes[1]: name is missing",
    ),
]
BAD_URIS = [
    "",
    "models/target",
    "http://example.com/model",
    "pvc://",
    "pvc://Models/target",
    "pvc://models/../other",
    "pvc://models/..",
    "file://models/target",
    "file:///",
    "file:///models/../etc",
    "hf://model",
    "hf://org/name/extra",
    "hf://org/name@main",
    "s3://bucket",
    "s3://bucket/",
    "s3://bucket/a/../b",
    "hf://org/name\n",
]
GOOD_URIS = [
    "pvc://models",
    "pvc://models/a/b.c",
    "file:///models/a",
    "hf://org/Name-1.5_x",
    "s3://my.bucket/a/b",
    "pvc://a/..b",
]
UNKNOWN_TO_THE_SCHEMA = {"label-key"}
"""Faults that only the operator finds: keys of maps have no pattern in a CRD."""
