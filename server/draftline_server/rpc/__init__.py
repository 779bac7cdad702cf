"""The gRPC service: converts, admits, streams, drains. Decides nothing about tokens."""
