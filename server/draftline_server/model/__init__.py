"""What needs torch: loading, attention, the KV cache, packed forwards and logits."""
