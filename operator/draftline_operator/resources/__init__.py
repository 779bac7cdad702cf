"""Manifests of children, one file for each kind: pure functions of a resource and the operator's settings.

Equal input gives equal bytes, in every process. What is not wanted is absent, never null, so that server-side
apply removes what a resource no longer asks for. Faults of the user's own part are `InvalidSpecError`s that
name the field. Nothing here reads the cluster, a clock or the environment.

    labels.py            selector_labels(name), common_labels(resource, component=),
                         owner_reference(resource), object_metadata(resource, name, component=)
    pair.py              pair_key(resource, settings) -> 8 hex digits
    server_config.py     server_config(resource, pair_digest=) -> the server's configuration as a dict
    config_map.py        config_text(...), config_hash(...), render_config_map(resource, pair_digest=)
    pair_record.py       render_pair_record(resource, pair_key, result_json)
    preflight_job.py     render_preflight_job(resource, settings, accelerator_memory_bytes=)
    deployment.py        render_deployment(resource, settings, pair_digest=, replicas=, secrets_hash=,
                         verified=)
    services.py          render_client_service(resource), render_headless_service(resource)
    service_account.py, pod_disruption_budget.py, network_policy.py, service_monitor.py,
    horizontal_pod_autoscaler.py, scaled_object.py     render_<kind>(resource[, settings])

`pods.py` has what the pods of the Deployment and of the preflight Job share, `pod_additions.py` what users
add to them, `model_volumes.py` where models come from, `times.py` and `probes.py` how long things take.
"""
