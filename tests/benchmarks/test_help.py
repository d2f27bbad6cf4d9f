"""`python -m benchmarks`: help is printed at once, and nothing is measured, nor the contract tests run, for it."""

import pytest

from benchmarks import __main__ as command


@pytest.fixture(autouse=True)
def _no_contracts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "contracts_hold", lambda: pytest.fail("the contract tests ran"))


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_of_all(flag: str, capsys: pytest.CaptureFixture[str]):
    assert command.main([flag]) == 0
    said = capsys.readouterr().out
    assert "python -m benchmarks NAME" in said
    assert all(name in said for name in command.names())


@pytest.mark.parametrize("name", command.names())
def test_the_help_of_one(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--quick", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert command.main(["best", "--help"]) == 2
    assert "there is no benchmark 'best'; there are accelerator, " in capsys.readouterr().err
