"""constraints.txt pins every package that an extra asks for, so that pip has nothing to search; CI resolves them."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIREMENTS = {
    extra: [Requirement(wanted) for wanted in packages if Requirement(wanted).name != PROJECT["name"]]
    for extra, packages in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items()
}
PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for pin in [Requirement(line)]
}


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_every_package_of_an_extra_is_pinned_to_a_version_that_it_takes(extra):
    for wanted in REQUIREMENTS[extra]:
        (pin,) = PINS[canonicalize_name(wanted.name)].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version, prereleases=True), wanted


def test_what_tests_marked_peers_import_is_in_the_extra():
    assert {"accelerate", "diffusers", "peft", "transformers"} <= {wanted.name for wanted in REQUIREMENTS["peers"]}
