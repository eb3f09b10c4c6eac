"""Fingerprints of the settings available to a run."""

from __future__ import annotations

import re

from tuned_examples import H200, family

from leanbench.configs.fingerprint import settings_hash
from leanbench.configs.store import path_of, save_families
from leanbench.gpu.catalogue import find


def test_the_settings_hash_changes_with_a_file_of_this_gpu_and_no_other(home, ship, monkeypatch):
    assert settings_hash(H200) == "heuristic"
    ship(family())
    shipped = settings_hash(H200)
    assert re.fullmatch("[0-9a-f]{12}", shipped)
    save_families(find("b200"), [family(source="predicted")])
    assert settings_hash(H200) == shipped != settings_hash(find("b200"))

    save_families(H200, [family()])
    own = settings_hash(H200)
    assert own != shipped
    path_of("h200").write_text(path_of("h200").read_text() + "\n")
    assert settings_hash(H200) not in (own, shipped)

    monkeypatch.setenv("LEANBENCH_CONFIGS", "off")
    assert settings_hash(H200) == "heuristic"
