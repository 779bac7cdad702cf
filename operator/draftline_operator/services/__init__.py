"""What the operator does, in terms of its ports: no kopf and no Kubernetes client in here."""
