"""Node affinity: the operator's own requirement and the user's, both of which must hold."""

from __future__ import annotations

from typing import Any

from draftline_operator.errors import InvalidSpecError
from draftline_operator.models.schema import KubernetesObject, as_object

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_AFFINITY = "spec.podTemplate.affinity"
_NODE_AFFINITY = f"{_AFFINITY}.nodeAffinity"
_TERMS = f"{_NODE_AFFINITY}.{_REQUIRED}.nodeSelectorTerms"


def combined_affinity(user: KubernetesObject | None) -> dict[str, Any]:
    """Terms are alternatives, so the own requirement goes into each of them; all else is passed through."""
    affinity = user or {}
    node_affinity = as_object(affinity.get("nodeAffinity", {}), _NODE_AFFINITY)
    terms = _terms(node_affinity[_REQUIRED]) if _REQUIRED in node_affinity else [{}]
    combined = [
        {**term, "matchExpressions": [_own_expression(), *(term.get("matchExpressions") or [])]}
        for term in terms
    ]
    return {**affinity, "nodeAffinity": {**node_affinity, _REQUIRED: {"nodeSelectorTerms": combined}}}


def _own_expression() -> dict[str, Any]:
    """The images are built for Linux; on mixed clusters a pod must not end up elsewhere."""
    return {"key": "kubernetes.io/os", "operator": "In", "values": ["linux"]}


def _terms(required: Any) -> list[dict[str, Any]]:
    """An empty term matches no node by itself, but would match all once our requirement is added: refused."""
    terms = as_object(required, _TERMS.rpartition(".")[0]).get("nodeSelectorTerms")
    if not isinstance(terms, list) or not terms:
        raise InvalidSpecError(_TERMS, "must be a list of at least one term")
    for index, term in enumerate(terms):
        field = f"{_TERMS}[{index}]"
        if not any(as_object(term, field).get(key) for key in ("matchExpressions", "matchFields")):
            raise InvalidSpecError(field, "must have matchExpressions or matchFields")
        if not isinstance(term.get("matchExpressions") or [], list):
            raise InvalidSpecError(f"{field}.matchExpressions", "must be a list")
    return terms
