"""Recurrent and state-space mixers: what stands in an attention's place and is none."""
