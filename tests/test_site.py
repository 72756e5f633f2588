"""The documentation is built as a site, without warnings and without the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFIGURATION = ROOT / "docs" / "site" / "mkdocs.yml"
LOADED = re.compile(r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*="(https?://[^"]+)')
"""What a browser loads from another host when it opens a page."""


def build(configuration: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """A strict build of the site into `target`; any use of the network fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(configuration)]
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "-d", str(target)], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(CONFIGURATION, target)

    assert 0 == done.returncode, done.stderr
    assert "WARNING" not in done.stderr
    return target


@pytest.mark.slow
def test_every_page_is_built(site: Path) -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    built = [site / page.relative_to(ROOT / "docs").with_suffix("") for page in pages]

    assert [] == [
        str(page)
        for page in built
        if not (page.parent if "index" == page.name else page).joinpath("index.html").is_file()
    ]


@pytest.mark.slow
def test_the_reference_documents_what_is_public(site: Path) -> None:
    page = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    names = ("plan", "parallelize", "verify", "from_pretrained", "ShardedModel", "Plan", "Evidence")

    assert [] == [name for name in names if f'id="autotp.{name}"' not in page]
    assert 'id="autotp.errors.PlanError"' in page


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]

    assert [] == [address for page in pages for address in LOADED.findall(page)]
    assert ["https://fonts.example/a.css"] == LOADED.findall(
        '<link rel="stylesheet" href="https://fonts.example/a.css">'
    )


@pytest.mark.slow
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    page, configuration = tmp_path / "docs" / "index.md", tmp_path / "mkdocs.yml"
    page.parent.mkdir()
    configuration.write_text("site_name: a\ntheme: material\n", encoding="utf-8")
    page.write_text("# A page\n", encoding="utf-8")

    assert 0 == build(configuration, tmp_path / "built").returncode

    page.write_text("# A page\n\n[none](none.md)\n", encoding="utf-8")
    done = build(configuration, tmp_path / "built")

    assert 1 == done.returncode
    assert "none.md" in done.stderr
