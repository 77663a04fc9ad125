"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("DSWML_DATA", _CHECKOUT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data sets not found in {folder}: set DSWML_DATA to their folder")
    return folder
