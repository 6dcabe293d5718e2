"""Writes the Homebrew formula of a built archive: its checksum, and the pins of `constraints.txt` that run on a Mac.

    uv build
    .venv/bin/python -m scripts.brew_formula dist/start_llm-*.tar.gz --url https://...tar.gz > start-llm.rb

Put the file into `Formula/` of a tap (`brew tap-new YOU/tap` makes one), then `brew install YOU/tap/start-llm`. Without
`--url` the formula installs the archive from where it lies.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "packaging" / "start-llm.rb.in"
MAC = {"sys_platform": "darwin", "platform_system": "Darwin", "os_name": "posix", "platform_machine": "arm64"}
OWN = "-r requirements.txt"


def pins(constraints: str) -> list[str]:
    """``name==version`` of what `requirements.txt` brings with it on a Mac; `constraints` is the text of that file.

    Its comments say what each package is there for.
    """
    lines = [line.partition("# via ") for line in constraints.splitlines() if re.match(r"[a-z0-9]", line)]
    wanted_by = {}
    for line, _, via in lines:
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(MAC | {"python_full_version": "3.12.0", "python_version": "3.12"}):
            wanted_by[f"{pin.name}{pin.specifier}"] = set(via.strip().split(", "))
    kept = {OWN}
    found: list[str] = []
    while more := [pin for pin, names in wanted_by.items() if pin not in found and names & kept]:
        found += more
        kept |= {pin.partition("==")[0] for pin in more}
    return sorted(found)


def formula(archive: Path, url: str) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    values = {
        "DESCRIPTION": re.sub("^A (.)", lambda begin: begin[1].upper(), project["description"]),
        "HOMEPAGE": url.partition("/releases/")[0],
        "URL": url,
        "SHA256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "LICENSE": project["license"],
        "PYTHON": project["requires-python"].partition(",")[0].strip(">="),
        "PINS": "\n".join(f"    {pin}" for pin in pins(constraints)),
    }
    return re.sub(r"@([A-Z0-9]+)@", lambda found: values[found[1]], TEMPLATE.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the source archive that uv build made")
    parser.add_argument("--url", help="where it can be fetched")
    options = parser.parse_args()
    sys.stdout.write(formula(options.archive, options.url or options.archive.resolve().as_uri()))


if __name__ == "__main__":
    main()
