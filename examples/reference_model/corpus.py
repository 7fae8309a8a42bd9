"""The text: `python -m examples.reference_model.corpus --out DIR` (needs apt-get and dpkg-deb, of Debian 12).

Four documentation packages whose licences put no condition on what is trained on them. Their text is reduced to plain
ASCII sentences, one a line. Some books of the Bible are left out of the training text: they are the haystack that
evaluation hides its tasks in, and come with the package (`herald_jax/haystack.txt.gz`).
"""

from __future__ import annotations

import argparse
import gzip
import html
import re
import struct
import subprocess
import tempfile
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path

from herald_jax.tasks import sentences

# Package → licence of its text.
PACKAGES = {
    "sword-text-web": "public domain",
    "python3.11-doc": "PSF",
    "wordnet-base": "WordNet 3.0",
    "postgresql-doc-15": "PostgreSQL",
}
# Kept for evaluation: Genesis, Exodus and the gospels of Luke and John, by their number in the module's two files.
HELD_OUT = {"ot": (1, 2), "nt": (3, 4)}
TRAIN, HAYSTACK = "train.txt.gz", "haystack.txt.gz"


def fetch(directory: Path) -> None:
    """Download and unpack the packages into `directory/<package>`. Raises CalledProcessError when apt-get fails."""
    directory.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if not any(directory.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "-q", "download", package], cwd=directory, check=True)
        archive = next(iter(directory.glob(f"{package}_*.deb")))
        subprocess.run(["dpkg-deb", "-x", archive.name, package], cwd=directory, check=True)


def plain(text: str) -> str:
    """ASCII with simple quotes and single spaces."""
    for pair in ("“”", "„‟"):
        text = re.sub(f"[{pair}]", '"', text)
    text = re.sub("[‘’]", "'", text)
    text = re.sub("[–—]", "-", text)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")
    return " ".join(text.split())


def bible(directory: Path) -> Iterator[tuple[str, int, str]]:
    """(testament, number of the book from 0, its text). The format is SWORD's zText: zlib blocks of OSIS XML."""
    root = next(iter(directory.rglob("engWEB*/ot.bzs"))).parent
    for testament in ("ot", "nt"):
        index = (root / f"{testament}.bzs").read_bytes()
        data = (root / f"{testament}.bzz").read_bytes()
        for number in range(len(index) // 12):
            start, size, _ = struct.unpack_from("<III", index, 12 * number)
            if size == 0:
                continue
            xml = zlib.decompress(data[start : start + size]).decode("utf-8")
            xml = re.sub(r"<(note|title)\b.*?</\1>", " ", xml, flags=re.DOTALL)
            yield testament, number, plain(html.unescape(re.sub(r"<[^>]*>", "", xml.replace("\x00", " "))))


def python_docs(directory: Path) -> Iterator[str]:
    """Paragraphs of running text; code, directives and tables are left out."""
    for path in sorted(directory.rglob("*.rst.txt")):
        for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            lines = paragraph.split("\n")
            if any(line.startswith((" ", "\t", "..", "=", "-", "*", "~", "^", "+", "|")) for line in lines if line):
                continue
            text = re.sub(r":[\w:+-]+:`[~!]?([^`<]*?)(?:\s*<[^`>]*>)?`", r"\1", " ".join(lines))
            text = re.sub(r"`+([^`<]*?)(?:\s*<[^`>]*>)?`+_*", r"\1", text)
            yield plain(text.replace("**", "").replace("*", "").replace("::", ":"))


def glosses(directory: Path) -> Iterator[str]:
    """Definitions and examples of WordNet, as sentences."""
    for path in sorted(directory.rglob("wordnet/data.*")):
        for line in path.read_text(encoding="utf-8").split("\n"):
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            if not gloss or len(fields) < 5 or not fields[0].isdigit():
                continue
            word = fields[4].replace("_", " ").split("(")[0]
            definition = gloss.split(";")[0].strip().strip('"')
            yield plain(f"{word[:1].upper()}{word[1:]} means {definition}.")


def postgres_docs(directory: Path) -> Iterator[str]:
    """Paragraphs of the manual."""
    for path in sorted(directory.rglob("*.html")):
        page = path.read_text(encoding="utf-8")
        for paragraph in re.findall(r"<p>(.*?)</p>", page, flags=re.DOTALL):
            yield plain(html.unescape(re.sub(r"<[^>]*>", "", paragraph)))


def build(directory: Path) -> tuple[list[str], list[str]]:
    """Sentences to train on and sentences held out, from unpacked packages."""
    train: list[str] = []
    held: list[str] = []
    for testament, number, text in bible(directory / "sword-text-web"):
        (held if number in HELD_OUT[testament] else train).extend(sentences(text))
    for source in (
        python_docs(directory / "python3.11-doc"),
        postgres_docs(directory / "postgresql-doc-15"),
        glosses(directory / "wordnet-base"),
    ):
        for text in source:
            train.extend(sentences(text))
    return train, held


def write(path: Path, lines: list[str]) -> None:
    # No time stamp and no name inside: the same text is the same file.
    with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=9, mtime=0) as out:
        out.write(("\n".join(lines) + "\n").encode("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help=f"where {TRAIN} and {HAYSTACK} go")
    parser.add_argument("--packages", type=Path, help="where the packages are kept (default: a temporary directory)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        packages = args.packages or Path(temporary)
        fetch(packages)
        train, held = build(packages)
    write(args.out / TRAIN, train)
    write(args.out / HAYSTACK, held)
    for name, lines in ((TRAIN, train), (HAYSTACK, held)):
        size, packed = sum(map(len, lines)) / 1e6, (args.out / name).stat().st_size / 1e6
        print(f"{name}: {len(lines)} sentences, {size:.1f} MB of text, {packed:.1f} MB compressed")


if __name__ == "__main__":
    main()
