"""From sound to the frames that Whisper reads: a spectrogram of logarithms on the mel scale."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mercer.errors import InvalidArgument

RATE = 16_000
"""Samples a second."""
WINDOW, HOP = 400, 160
"""Samples of a frame (25 ms), and from one frame to the next (10 ms)."""
FRAMES = 3_000
"""Of half a minute, which Whisper hears at once."""
_BREAK, _HERTZ_A_MEL = 1_000.0, 200 / 3
_STEP = np.log(6.4) / 27


def log_mel(samples: np.ndarray, *, bins: int = 80, frames: int = FRAMES) -> np.ndarray:
    """Frames [bins, frames], float32, of a sound at 16 kHz (Radford et al. 2022, arXiv 2212.04356, section 2.2).

    Silence is put behind the sound until it fills the frames. Of every 25 ms, under a Hann window and 10 ms apart, the
    powers P = |DFT|^2 are weighed by triangles M on the mel scale of Slaney's Auditory Toolbox, each of unit area, from
    0 to 8 kHz; L = log10 max(M P, 1e-10), cut at 8 below its maximum over the whole sound, gives (max(L, max L - 8) +
    4) / 4. The sound is mirrored at its ends for the frames there.

    samples: [n] between -1 and 1. bins: how many triangles, 80 or, in the newest models, 128.

    Raises:
        InvalidArgument: samples are no finite numbers [n], or more than the frames hold.
    """
    samples = np.asarray(samples)
    if samples.ndim != 1 or not np.issubdtype(samples.dtype, np.floating) or not np.isfinite(samples).all():
        raise InvalidArgument(
            f"samples must be finite floating-point numbers [n] at {RATE} Hz, between -1 and 1, got {samples.dtype} "
            f"{list(samples.shape)}"
        )
    room = frames * HOP
    if bins < 1 or room < WINDOW:
        raise InvalidArgument(f"bins is at least 1 and frames at least {-(-WINDOW // HOP)}, got {bins} and {frames}")
    if len(samples) > room:
        raise InvalidArgument(
            f"the sound lasts {len(samples) / RATE:.1f} s, and {frames} frames {room / RATE:.1f} s; cut it into pieces"
        )
    sound = np.zeros(room)
    sound[: len(samples)] = samples
    around = np.pad(sound, WINDOW // 2, mode="reflect")
    pieces = np.lib.stride_tricks.sliding_window_view(around, WINDOW)[::HOP][:frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(pieces * hann)) ** 2
    logs = np.log10(np.maximum(power @ _triangles(bins).T, 1e-10))
    return np.ascontiguousarray(((np.maximum(logs, logs.max() - 8) + 4) / 4).T, dtype=np.float32)


@lru_cache(maxsize=4)
def _triangles(bins: int) -> np.ndarray:
    """[bins, WINDOW / 2 + 1]: of each bin the weights of the frequencies of the transform."""
    edges = _hertz(np.linspace(0, _mels(RATE / 2), bins + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    up = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    down = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
    weights = np.maximum(np.minimum(up, down), 0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    weights.flags.writeable = False
    return weights


def _mels(hertz: float) -> float:
    """The mel scale: linear to 1 kHz, then logarithmic."""
    return hertz / _HERTZ_A_MEL if hertz < _BREAK else float(_BREAK / _HERTZ_A_MEL + np.log(hertz / _BREAK) / _STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    """The inverse of `_mels`."""
    turn = _BREAK / _HERTZ_A_MEL
    return np.where(mels < turn, mels * _HERTZ_A_MEL, _BREAK * np.exp(_STEP * (np.maximum(mels, turn) - turn)))
