"""The only code that knows the Kubernetes client: plain JSON objects in and out, errors of our own tree."""
