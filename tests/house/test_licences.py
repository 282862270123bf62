"""The list of licences is current, and nothing that is deployed is under an unknown licence or the GPL."""

import hashlib
from importlib.metadata import PackageNotFoundError, distribution

from scripts.licences import BUNDLED, LICENCES, STATIC, UNKNOWN, bundled, licence_of, locked, note_on, row


def test_the_list_names_every_locked_package_with_its_version_and_licence() -> None:
    lines = LICENCES.read_text().splitlines()
    listed = [
        tuple(line.strip("| ").split(" | ")[:2]) for line in lines if line.startswith("| ") and "package |" not in line
    ]
    packaged = [package for packages in locked().values() for package in packages]
    assert listed == [*packaged, *(package[:2] for package in BUNDLED)], "run make licences"
    for packages in locked().values():
        for name, version in packages:
            try:
                installed = distribution(name)
            except PackageNotFoundError:
                continue
            if installed.version.split("+")[0] == version:
                assert row(name, version, licence_of(installed)) in lines, "run make licences"


def test_bundled_files_are_those_of_their_release_and_have_a_licence_text() -> None:
    assert set(bundled()) <= set(LICENCES.read_text().splitlines()), "run make licences"
    for *_, file, digest in BUNDLED:
        assert hashlib.sha256((STATIC / file).read_bytes()).hexdigest() == digest, f"{file}: see BUNDLED"
        assert list(STATIC.glob(f"{file.split('.')[0]}-LICENSE.*")), file


def test_what_is_deployed_is_under_a_known_licence_and_none_is_of_the_gpl_family() -> None:
    deployed = LICENCES.read_text().split("## Development only")[0].split("## Deployed")[1]
    assert UNKNOWN not in LICENCES.read_text()
    assert "**copyleft**" not in deployed


def test_licences_are_classified() -> None:
    assert note_on("GPL-3.0-or-later") == note_on("AGPL-3.0") == "**copyleft**"
    assert (
        note_on("GNU Library or Lesser General Public License (LGPL)") == note_on("MPL-2.0 AND MIT") == "weak copyleft"
    )
    assert note_on("MIT") == note_on("BSD-3-Clause") == ""
    assert note_on(UNKNOWN)
