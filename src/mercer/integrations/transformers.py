"""Attention of Hugging Face models by mercer's kernels, normalisers and structures.

    import mercer.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="mercer:taylor4-l2")
    model.set_attn_implementation("mercer:softmax")

Importing registers the common names; :func:`register` any other, and parts of one's own.
"""

from mercer.integrations.hf.registry import register, register_common
from mercer.integrations.hf.states import StateCache
from mercer.integrations.hf.swap import load_kernel_tensors, swap_attention

__all__ = ["StateCache", "load_kernel_tensors", "register", "swap_attention"]

register_common()
