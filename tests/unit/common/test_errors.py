"""How an extra is installed: from the clone that the code runs in, or by its name."""

from pathlib import Path

import pytest

from fissile._common import errors


def test_in_a_clone_the_extra_is_installed_from_there():
    root = Path(__file__).parents[3]
    with pytest.raises(errors.FissileError) as error:
        errors.needs("no_such_package", "lab")
    assert str(error.value) == f"this needs no_such_package: pip install -e '{root}[lab]'"


def test_from_a_wheel_the_extra_is_installed_by_name(monkeypatch, tmp_path):
    place = tmp_path / "lib" / "site-packages" / "fissile" / "_common" / "errors.py"
    monkeypatch.setattr(errors, "__file__", str(place))
    with pytest.raises(errors.FissileError, match=r"pip install 'fissile\[lab\]'"):
        errors.needs("no_such_package", "lab")


def test_a_package_that_is_there_is_no_error():
    errors.needs("torch", "lab")
