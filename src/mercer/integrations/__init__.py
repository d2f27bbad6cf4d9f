"""Mercer in other people's programs: each module is imported by name, and only when asked for.

`mercer.integrations.transformers` swaps the attention of Hugging Face models; `mercer.integrations.torch` has torch's
`scaled_dot_product_attention` with kernels and normalisers.
"""
