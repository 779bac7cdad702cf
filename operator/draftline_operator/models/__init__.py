"""The resource, its status and what is seen of the cluster, as frozen data."""
