"""The only code beside main that knows kopf: events in, keys into the queue."""
