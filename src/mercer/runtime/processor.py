"""Which products of matrices the processor has units of its own for."""

from functools import lru_cache


@lru_cache
def multiplies_tiles() -> bool:
    """Whether bfloat16 is multiplied in tiles here: by Intel's AMX, which torch's own products then use too.

    True where torch finds the instructions and the system lets this process use their registers (on Linux they are
    asked for once, for all of its threads). Where torch does not say, False. Imports torch.
    """
    import torch

    found, asked = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_init_amx"))
    return found is not None and asked is not None and bool(found()) and bool(asked())
