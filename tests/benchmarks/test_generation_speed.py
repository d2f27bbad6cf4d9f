"""What `generation_speed` counts and shows, without running anybody."""

import pytest
from benchmarks._generation_contestants import CONTESTANTS, Stamps, prompt_of, told
from benchmarks._generation_models import SHAPES

from benchmarks import generation_speed


def test_bytes_of_a_step_by_hand() -> None:
    """SmolLM2-135M has 134,479,872 weights in matrices; 100 tokens keep 2 x 30 x 3 x 64 numbers each."""
    weights, kept = 134_479_872, 100 * 11_520
    assert generation_speed.step_bytes("smollm2-135m", "float32", 100) == 4 * (weights + kept)
    assert generation_speed.step_bytes("smollm2-135m", "int8", 100) == pytest.approx(1.0625 * weights + 2 * kept)


def test_prompts_have_no_token_that_ends_them() -> None:
    for shape in SHAPES:
        prompt = prompt_of(2048, shape)
        assert len(prompt) == 2048
        assert min(prompt) >= 300
        assert max(prompt) < SHAPES[shape][0]


def test_times_are_those_of_one_call_each() -> None:
    """Two calls of four tokens: the first after 5 and 4 s, the others after 1, 1, 9 and 1, 2, 3."""

    def call(*times: float) -> Stamps:
        stamps = Stamps()
        for at, token in zip(times, (7, 8, 9, 10), strict=True):
            stamps(token)
            stamps.clock[-1], stamps.busy[-1] = stamps.clock[0] + at, stamps.busy[0] + 2 * at
        return stamps

    found = told([call(5, 6, 7, 16), call(4, 5, 7, 10)])
    assert found.pop("tokens") == [7, 8, 9, 10]
    expected = {"first": 4, "first_cpu": 8, "token": 1.5, "mean": 2, "cpu": 4}
    assert found == pytest.approx(expected)


def test_the_table_has_ratios_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*times: float) -> list[dict[str, float]]:
        same = {"load": 2.0, "peak": 3e6, "first_cpu": 1.0, "agrees": 9}
        return [same | {"token": t, "first": 10 * t, "mean": t, "cpu": t} for t in times]

    found = {"dtype": "float32", "prompt": 64, "step_bytes": 1e8, "read_bytes_per_second": 1e10}
    rows = {"mercer": runs(0.02, 0.04), "transformers": runs(0.04, 0.12)}
    generation_speed.shown(found | {"rows": rows, "skipped": {"llama.cpp": "it is not installed"}})
    shown = capsys.readouterr().out
    assert "2.50 times ours a token, 2.50 to the first" in shown  # 2 and 3
    assert "33%" in shown  # 10 of 30 ms
    assert "left out: it is not installed" in shown


def test_every_contestant_has_a_package_and_dtypes() -> None:
    for name, (_, package, dtypes) in CONTESTANTS.items():
        assert package.isidentifier(), name
        assert set(dtypes) <= set(generation_speed.BYTES), name
