"""Commands in the process of the tests."""

from typer.testing import CliRunner, Result

from leanbench.cli.main import app


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def refusal(*words: str) -> str:
    """Return the only sentence of a command that is refused."""
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [error] = [line for line in result.stderr.splitlines() if not line.startswith("No GPU here")]
    assert error.startswith("Error: ")
    return error.removeprefix("Error: ")


def printed(*words: str) -> str:
    """Return what a command that succeeds prints."""
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout
