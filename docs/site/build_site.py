# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site of pages, docstrings, headers and the help of the commands.

usage: build_site.py [--out FOLDER]

FOLDER (build/docs) gets `site`, with the pages; `cpp`, what Doxygen makes of the headers; and
`source`, the input of Sphinx. The pages are read without a network. A warning of Doxygen or Sphinx,
a broken link, and a page that would load a file from another host end the build with an error.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))

from built_site import broken_links, external_resources
from reference_pages import write_reference
from staged_pages import BrokenLink, Staging

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    folder = parser.parse_args().out.resolve()
    site = folder / "site"
    try:
        build(folder, site)
    except BrokenLink as error:
        print(f"build_site.py: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"build_site.py: {error.cmd[0]} failed; its messages are above", file=sys.stderr)
        return 1
    faults = [f"broken link: {one}" for one in broken_links(site)]
    faults += [f"external resource: {one}" for one in external_resources(site)]
    for fault in faults:
        print(f"build_site.py: {fault}", file=sys.stderr)
    if not faults:
        print(site / "index.html")
    return 1 if faults else 0


def build(folder: Path, site: Path) -> None:
    source = folder / "source"
    run_doxygen(folder / "cpp")
    Staging(ROOT, source).write()
    write_reference(ROOT, source)
    shutil.rmtree(site, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-q",
        "-W",
        "--keep-going",
        "-E",
        "-j",
        "auto",
    ]
    command += ["-c", str(Path(__file__).parent), "-d", str(folder / "doctrees")]
    command += ["-D", f"breathe_projects.penstock={folder / 'cpp' / 'xml'}", str(source), str(site)]
    subprocess.run(command, check=True, cwd=ROOT)
    shutil.copytree(folder / "cpp" / "html", site / "cpp")


def run_doxygen(folder: Path) -> None:
    """Writes `html` and `xml` to the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    settings = (ROOT / "docs" / "reference" / "cpp" / "Doxyfile").read_text(encoding="utf-8")
    settings += f"\nOUTPUT_DIRECTORY = {folder}\n"
    subprocess.run(["doxygen", "-"], input=settings, check=True, cwd=ROOT, text=True)
    for path in (folder / "xml").glob("*.xml"):
        leave_out_private(path)


def leave_out_private(path: Path) -> None:
    """Takes private members out of Doxygen's XML, where no setting of Doxygen's does so."""
    tree = ElementTree.parse(path)
    for compound in tree.getroot().iter("compounddef"):
        for section in compound.findall("sectiondef"):
            if section.attrib["kind"].startswith("private"):
                compound.remove(section)
    tree.write(path, encoding="utf-8", xml_declaration=True)


if __name__ == "__main__":
    sys.exit(main())
