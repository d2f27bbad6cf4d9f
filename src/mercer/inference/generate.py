"""Text from a model, one token at a time, through the states that its layers leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from mercer.errors import InvalidArgument, Unsupported
from mercer.inference.sampler import Sampling

if TYPE_CHECKING:
    from mercer.models.decoder import DecoderLM


def generate(
    model: DecoderLM,
    prompt: Sequence[int] | torch.Tensor,
    max_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    prefill: int = 512,
) -> Iterator[int]:
    """Continue a prompt, yielding each token as soon as it is chosen.

    The prompt is read in pieces and every later step reads one token, so that memory beyond the model is the states':
    constant for feature states, a row a token for key/value caches.

    Args:
        model: its forward takes and returns states.
        prompt: [n] tokens, at least one.
        max_tokens: how many to yield; 0 yields none.
        sampling: default `Sampling()`, the model's own distribution.
        seed: of the draws: the same seed, prompt and model give the same tokens.
        prefill: tokens of the prompt read at once.

    Raises:
        InvalidArgument: the prompt is empty or has tokens outside the vocabulary, a count is out of range, or the
            model's positions do not reach that far.
        Unsupported: a layer's structure depends on the length of the text, so that no state can continue it.
        NonFinite: the model's logits are not finite.
    """
    sampling = sampling or Sampling()
    if max_tokens < 0 or prefill < 1:
        raise InvalidArgument(f"max_tokens={max_tokens} and prefill={prefill}: at least 0 and 1 are needed")
    device = next(model.parameters()).device
    tokens = _tokens(prompt).to(device)
    size = model.config.vocab_size
    if int(tokens.min()) < 0 or int(tokens.max()) >= size:
        raise InvalidArgument(f"the prompt has tokens outside 0..{size - 1}, the model's vocabulary")
    if model.config.refuses_states is not None:
        raise Unsupported(model.config.refuses_states)
    longest = model.reach
    # The last token is not read again, so it needs no position.
    if longest is not None and max_tokens and len(tokens) + max_tokens - 1 > longest:
        kind = model.config.position
        limit = f"max_length={longest}" if longest == model.config.max_length else str(longest)
        fix = {
            "learned": "",
            "rotary": ", unless rope_scaling=... scales its positions or allow_longer=True lets them run on",
            "sinusoidal": ", unless allow_longer=True lets them run on",
        }[kind]
        raise InvalidArgument(
            f"the model has {kind} positions for {limit} tokens, too few to continue a prompt of "
            f"{len(tokens)} by max_tokens={max_tokens}; {_room(longest, len(tokens))}{fix}"
        )
    return _continue(model, tokens, max_tokens, sampling, seed, prefill)


def _tokens(prompt: Sequence[int] | torch.Tensor) -> torch.Tensor:
    try:
        tokens = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"the prompt must be whole numbers in one dimension ({error})") from error
    if tokens.ndim != 1 or not len(tokens):
        raise InvalidArgument(f"the prompt has shape {list(tokens.shape)}; give at least one token in one dimension")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InvalidArgument(f"the prompt has dtype {tokens.dtype}; tokens are whole numbers")
    return tokens.to(torch.int64)


def _room(longest: int, read: int) -> str:
    room = longest - read + 1
    return f"at most {room} can follow" if room > 0 else f"give at most {longest} tokens"


def _continue(
    model: DecoderLM, tokens: torch.Tensor, max_tokens: int, sampling: Sampling, seed: int, prefill: int
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    states = None
    pieces = list(tokens.split(prefill))
    for _ in range(max_tokens):
        with torch.inference_mode():  # entered anew for each token: the caller's code runs between them
            for piece in pieces:
                logits, states = model(piece.unsqueeze(0), states=states, return_states=True)
            token = sampling.choose(logits[0, -1], generator)  # pyright: ignore[reportPossiblyUnbound]
            pieces = [torch.tensor([token], device=tokens.device)]
        yield token
