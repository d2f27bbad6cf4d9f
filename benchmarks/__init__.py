"""Measurements, each a module with a docstring and `main(arguments)`; `python -m benchmarks` lists and runs them."""
