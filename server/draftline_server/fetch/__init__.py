"""Brings a model's files into a directory: whole, verified and with a manifest, or not at all."""
