"""Every error that the operator raises on purpose.

OperatorError
├── InvalidSpecError       the resource cannot be served as it is written; only a change of it helps
├── NameConflictError      a child's name is taken by an object that is not ours
├── ForbiddenError         the operator's own rights, or the namespace's quota, do not suffice
├── RejectedError          the API server refuses an object as it is written
└── ClusterError           the API server cannot be reached or refuses for now; worth a retry
    └── ConflictError        somebody else has changed the object in the meantime

NotFromMemoryError         no fault: what is to be done is decided on what the API server says now
"""

from __future__ import annotations


class OperatorError(Exception):
    """The root of the tree above. Messages go into conditions: one line, no secrets."""


class InvalidSpecError(OperatorError):
    """`field` is the path in the resource, such as ``spec.target.model.uri``."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class NameConflictError(OperatorError):
    """A child's name is taken by an object without our owner reference."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name} exists and does not belong to this resource")
        self.kind = kind
        self.name = name


class ForbiddenError(OperatorError):
    """The API server refused for lack of rights."""


class RejectedError(OperatorError):
    """The API server refuses an object as it is written; the same again would be refused again."""


class ClusterError(OperatorError):
    """The API server cannot be reached or refuses for now."""


class NotLeadingError(ClusterError):
    """Somebody else may act by now."""

    def __init__(self) -> None:
        super().__init__("this operator does not lead any more")


class ConflictError(ClusterError):
    """The object was changed by somebody else since it was read."""


class NotFromMemoryError(Exception):
    """There is something to be done, and nothing is done by what is remembered."""
