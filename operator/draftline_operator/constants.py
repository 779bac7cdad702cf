"""Names that other programs read: API coordinates, labels, annotations, metrics."""

from __future__ import annotations

from typing import Final

GROUP: Final = "draftline.dev"
VERSION: Final = "v1alpha1"
KIND: Final = "SpeculativeDeployment"
PLURAL: Final = "speculativedeployments"
API_VERSION: Final = f"{GROUP}/{VERSION}"

# The owner of fields that the operator applies.
FIELD_MANAGER: Final = "draftline-operator"

# Identity of what belongs to a resource: the only labels of selectors, for they can never change.
NAME_LABEL: Final = "app.kubernetes.io/name"
INSTANCE_LABEL: Final = "app.kubernetes.io/instance"
COMPONENT_LABEL: Final = "app.kubernetes.io/component"
APP_NAME: Final = "draftline"
SERVING: Final = "server"
PREFLIGHT: Final = "preflight"

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
# Of all that the operator makes, and of pods that its templates make: what it watches.
OUR_LABELS: Final = {NAME_LABEL: APP_NAME, MANAGED_BY_LABEL: FIELD_MANAGER}
PART_OF_LABEL: Final = "app.kubernetes.io/part-of"
# The pair that a pod serves, as a hash of what it is made of; the seam for canaries.
REVISION_LABEL: Final = f"{GROUP}/revision"

# Of a child: the hash of what was applied, so that nothing is written twice.
APPLIED_HASH_ANNOTATION: Final = f"{GROUP}/applied-hash"
# Of a pod template: the hash of the configuration file and of the secrets that it was made with.
CONFIG_HASH_ANNOTATION: Final = f"{GROUP}/config-hash"
SECRETS_HASH_ANNOTATION: Final = f"{GROUP}/secrets-hash"
DEFAULT_CONTAINER_ANNOTATION: Final = "kubectl.kubernetes.io/default-container"
POD_DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"

GRPC_PORT: Final = 50051
ADMIN_PORT: Final = 9090

# What the HPA reads from the operator, of a SpeculativeDeployment.
WAITING_METRIC: Final = "draftline_requests_waiting"
RUNNING_METRIC: Final = "draftline_requests_running"
