"""Inference: tokens from a trained model, one at a time."""
