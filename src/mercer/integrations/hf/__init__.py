"""Models of transformers: what `mercer.integrations.transformers` is made of. Its modules need that package."""
