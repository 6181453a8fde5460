"""The README says what the code does."""

import re
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from turnfold.cli import app
from turnfold.schemas.settings import variable

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_settings_table_names_every_setting_and_no_other(settings_fields: set[str]) -> None:
    documented = set(re.findall(r"^\| `(TURNFOLD_\w+)` \|", README, re.MULTILINE))
    assert documented == {variable(field) for field in settings_fields}


def test_the_settings_table_shows_the_defaults(settings_defaults: dict[str, str]) -> None:
    rows = re.findall(r"^\| `(TURNFOLD_\w+)` \| ([^|]*) \|", README, re.MULTILINE)
    for name, shown in rows:
        assert shown.strip().strip("`") == settings_defaults[name], name


def test_commands_in_the_readme_exist() -> None:
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    for name in re.findall(r"`turnfold ([a-z-]+)", README):
        assert name in root.commands, f"turnfold {name}"


def test_make_targets_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
