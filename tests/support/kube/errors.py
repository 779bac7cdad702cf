"""Why there is no cluster."""

from __future__ import annotations


class ClusterUnavailable(Exception):
    """No cluster can be had on this machine; the message is one line that says what is missing."""


class ClusterFailed(Exception):
    """A cluster could be had, but did not start, or did not do what it was told."""
