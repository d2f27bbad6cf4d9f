"""One file an architecture: what its configuration and its tensors are called on the hub, and what they are here."""
