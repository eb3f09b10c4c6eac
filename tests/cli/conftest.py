import pytest


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanbench.gpu.local.local_gpus", list)
