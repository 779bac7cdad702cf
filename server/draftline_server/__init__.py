"""The data plane of Draftline: serves a target model, sped up by drafts that it verifies."""

__version__ = "0.1.0"
