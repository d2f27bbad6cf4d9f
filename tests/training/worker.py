"""Run as a process of its own: trains Tiny in a folder and, if asked, kills itself at a chosen moment.

    python -m tests.training.worker FOLDER TEXT [MOMENT:NUMBER] [LIMIT]

MOMENT is "line" (half of the first metrics line from step NUMBER on is on the disk), "file" (the NUMBER-th safetensors
file was just written), "rename" (the NUMBER-th checkpoint just got its name), "prune" (the NUMBER-th deletion of a
checkpoint has deleted one of its files) or "step" (step NUMBER just ended).
LIMIT is the largest size of a file this process may write.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from tests.training.tiny import RECIPE, Tiny

from mercer.errors import MercerError
from mercer.training import checkpoint, metrics
from mercer.training.data import Corpus
from mercer.training.loop import Progress, fit


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, number: int) -> None:
    if moment == "line":
        write = metrics.Metrics.write

        def torn(self, event):
            if event["step"] < number:
                return write(self, event)
            self._file.write(metrics._line(event)[:25])
            self._file.flush()
            return die()

        metrics.Metrics.write = torn
    elif moment == "file":
        save_file, calls = checkpoint.save_file, []

        def half(tensors, path):
            save_file(tensors, path)
            calls.append(path)
            if len(calls) == number:
                die()

        checkpoint.save_file = half
    elif moment == "rename":
        prune, calls = checkpoint._prune, []

        def unpruned(run, keep):
            calls.append(run)
            return die() if len(calls) == number else prune(run, keep)

        checkpoint._prune = unpruned
    elif moment == "prune":
        rmtree, deleted = checkpoint.rmtree, []

        def part(folder):
            deleted.append(folder)
            if len(deleted) < number:
                return rmtree(folder)
            min(folder.iterdir()).unlink()
            return die()

        checkpoint.rmtree = part


def main(folder: Path, text: Path, moment: str = "", limit: str = "") -> None:
    torch.set_num_threads(1)
    kind, _, number = moment.partition(":")
    arm(kind, int(number or 0))

    def watch(progress: Progress) -> None:
        if kind == "step" and progress.phase == "step" and progress.step == int(number):
            die()
        if kind == "slow" and progress.phase == "step":
            time.sleep(0.02)

    corpus = Corpus.build([text], folder / "text")
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        result = fit(Tiny, {"kind": "tiny"}, RECIPE, corpus, folder, watch)
    except MercerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(result.held_out_loss)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
