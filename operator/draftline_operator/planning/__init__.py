"""Pure decisions: plain values in, plain values out; no clock, no network, no Kubernetes client."""
