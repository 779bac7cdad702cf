"""The control plane of Draftline: will turn a SpeculativeDeployment into serving pods. Empty for now."""
