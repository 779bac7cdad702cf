"""Proposers, verification and the choice of draft lengths."""
