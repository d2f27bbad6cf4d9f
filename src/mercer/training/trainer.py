"""Training the library's own language model; `mercer.training.loop` has the loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mercer.errors import InvalidArgument
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.training.config import TrainConfig
from mercer.training.data import Corpus
from mercer.training.loop import Progress, TrainResult, fit

__all__ = ["Progress", "TrainResult", "train"]


def train(
    model_config: ModelConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    folder: str | Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    restart: bool = False,
    tensorboard: bool = False,
) -> TrainResult:
    """Train a `DecoderLM` in ``folder``, or continue the run that was begun there.

    Args:
        model_config: the model; its vocabulary must be the corpus's.
        train_config: the recipe.
        corpus: training and held-out tokens.
        folder: receives run.json, metrics.jsonl and checkpoints/.
        progress: called after every step, evaluation and checkpoint.
        restart: delete the run in ``folder`` first.
        tensorboard: also write event files (needs the ``track`` extra).

    Raises:
        InvalidArgument: the folder holds a different run, or the text is shorter than a window.
        NonFinite: the loss or the gradient is not finite; the message names the step, the last checkpoint is kept.
        StorageError: a file cannot be written; the last checkpoint is kept.
        Interrupted: SIGINT or SIGTERM; a checkpoint of the last step was written.
    """
    if model_config.vocab_size != corpus.vocabulary.size:
        raise InvalidArgument(
            f"the model has vocab_size={model_config.vocab_size}, but the corpus has {corpus.vocabulary.size} tokens"
        )
    return fit(
        lambda: DecoderLM(model_config),
        model_config.model_dump(mode="json"),
        train_config,
        corpus,
        folder,
        progress,
        restart=restart,
        tensorboard=tensorboard,
        read_description=lambda values: ModelConfig(**values).model_dump(mode="json"),
    )
