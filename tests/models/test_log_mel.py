"""Frames of sound against transformers' extractor and against sounds whose spectrum is known."""

import numpy as np
import pytest

from mercer.errors import InvalidArgument
from mercer.models.log_mel import FRAMES, HOP, RATE, log_mel

SECONDS = np.arange(2 * RATE) / RATE


@pytest.mark.peers
@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("length", [1, 2 * RATE + 77, 30 * RATE])
def test_frames_are_those_of_transformers(bins, length):
    from transformers import WhisperFeatureExtractor

    generator = np.random.default_rng(1)
    fading = np.linspace(1, 0, length) ** 4  # loud and quiet parts, so that the cut below the maximum shows
    samples = generator.normal(size=length) * 0.1 * fading
    wanted = WhisperFeatureExtractor(feature_size=bins)(samples, sampling_rate=RATE, return_tensors="np")
    found = log_mel(samples, bins=bins)
    assert found.dtype == np.float32
    assert found.shape == (bins, FRAMES)
    assert np.abs(found - wanted.input_features[0]).max() < 2e-4
    assert found.max() - found.min() > 0.5 or length == 1


# A tone of m mel is 81 m / 45.25 triangles of 80 from 0 on (8 kHz are 45.25 mel, 1 kHz 15 mel), counted from 1.
@pytest.mark.parametrize(("hertz", "triangle"), [(480, 12), (1000, 26), (4000, 62)])
def test_a_tone_is_loudest_in_its_own_triangle(hertz, triangle):
    found = log_mel(0.5 * np.sin(2 * np.pi * hertz * SECONDS))
    assert found[:, 50].argmax() == triangle
    assert found[triangle, 50] == found.max()
    assert np.allclose(found[:, 300:], found.max() - 2)  # silence: 8 below the maximum, a quarter of it


def test_ten_times_the_sound_is_twenty_decibels_more():
    tone = 0.05 * np.sin(2 * np.pi * 700 * SECONDS)
    assert np.isclose(log_mel(10 * tone).max() - log_mel(tone).max(), 2 / 4, atol=1e-6)


def test_silence():
    assert np.allclose(log_mel(np.zeros(0)), -1.5)  # log10 of 1e-10 is -10


def test_fewer_frames():
    tone = np.sin(2 * np.pi * 700 * SECONDS).astype(np.float32)
    assert np.allclose(log_mel(tone, frames=300)[:, :250], log_mel(tone)[:, :250], atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "options", "sentence"),
    [
        (np.zeros((2, 8)), {}, r"finite floating-point numbers \[n\] at 16000 Hz.* got float64 \[2, 8\]"),
        (np.zeros(8, dtype=np.int16), {}, "got int16"),
        (np.array([0.0, np.nan]), {}, "finite"),
        (np.zeros(10 * HOP + 1), {"frames": 10}, "the sound lasts 0.1 s, and 10 frames 0.1 s; cut it into pieces"),
        (np.zeros(8), {"bins": 0}, "bins is at least 1 and frames at least 3, got 0 and 3000"),
        (np.zeros(8), {"frames": 2}, "got 80 and 2"),
    ],
)
def test_what_does_not_fit(samples, options, sentence):
    with pytest.raises(InvalidArgument, match=sentence):
        log_mel(samples, **options)
