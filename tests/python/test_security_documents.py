# SPDX-License-Identifier: Apache-2.0
"""SECURITY.md and PROTOCOL.md match the code: their constants, versions and sizes, and the tests
that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECURITY = (ROOT / "csrc" / "net" / "SECURITY.md").read_text(encoding="utf-8")
PROTOCOL = (ROOT / "csrc" / "wire" / "PROTOCOL.md").read_text(encoding="utf-8")

# Abbreviated as in SECURITY.md.
FILES = {
    "D": "test_dashboard_server.py",
    "K": "test_pool_skews.py",
    "P": "test_pool_security.py",
    "U": "test_no_unpickling.py",
}
NAMED = re.compile(r"(?:^|(?<=[ ;]))([DPUK])(?= `)|`([^`]+)`")
TEST = re.compile(r"^def (test_\w+)|^TEST(?:_[FP])?\(\w+, (\w+)\)", re.MULTILINE)

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1000, "ms": 1}
DURATION = re.compile(r"(?:std::chrono::)?(milliseconds|seconds)[({](\d+)[)}]")


def rows(text: str, columns: int) -> Iterator[list[str]]:
    """The rows of tables with this many columns, without their headers."""
    head_count = 0  # columns of the table; 0 outside a table
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("| ---"):
            head_count = len(cells)
        elif not line.startswith("|"):
            head_count = 0
        elif head_count > 0:
            assert len(cells) == head_count, line
            if head_count == columns:
                yield cells


def value_of(words: str) -> int:
    """The value of "2^20", "4,096", "16 MiB", "1.6 s"; times in milliseconds."""
    number, _, unit = words.replace(",", "").partition(" ")
    if number.startswith("2^"):
        return 1 << int(number[2:])
    return round(float(number) * UNITS[unit])


def evaluated(expression: str) -> int:
    """The value of a constant of C++ or Python; times in milliseconds."""
    if duration := DURATION.fullmatch(expression.strip()):
        return int(duration[2]) * (1000 if duration[1] == "seconds" else 1)
    plain = re.sub(r"(?<=\d)'(?=\d)", "", expression)
    plain = re.sub(r"\b\w+_t\{(\d+)\}|\b(\d+)(?:u|ULL|ull)\b", r"\1\2", plain)
    return eval_number(ast.parse(plain.strip(), mode="eval").body)


def eval_number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return round(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        return eval_number(node.left) << eval_number(node.right)
    raise ValueError(ast.dump(node))


def constant(file: str, name: str) -> int:
    """The default that a source gives a constant or an option."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(rf"\b{name}(?: = ([^;\n]+)|\{{(\w+)\}})(?:;|$)", text, re.MULTILINE)
    assert len(found) == 1, (file, name, found)
    equal, braced = found[0]
    if name.endswith("_S"):
        return round(float(equal.partition("#")[0]) * 1000)
    return evaluated(equal.partition("#")[0] or braced)


@cache
def names_of_tests(file: str) -> frozenset[str]:
    found = list((ROOT / "tests").rglob(file))
    assert len(found) == 1, (file, found)
    text = found[0].read_text(encoding="utf-8")
    return frozenset(one or other for one, other in TEST.findall(text))


# ---- SECURITY.md


def test_security_page_starts_with_who_trusts_whom() -> None:
    headings = re.findall(r"^## (.+)$", SECURITY, re.MULTILINE)
    assert headings[0] == "Who trusts whom"
    assert "one pool is one trust domain" in SECURITY.partition("## How")[0]
    assert headings[-2:] == ["Not promised", "Constants"]


def test_every_listed_attack_cites_existing_tests() -> None:
    attacks = list(rows(SECURITY, 3))
    assert len(attacks) > 50
    for attack, _, tests in attacks:
        file = None
        count = 0
        for letter, name in NAMED.findall(tests):
            if letter or name.endswith((".cpp", ".py")):
                file = FILES.get(letter, name)
            elif (ROOT / "tests" / "fuzz" / f"{name}_fuzz.cpp").exists():
                count += 1
            else:
                assert file is not None, (attack, name)
                known = names_of_tests(file)
                assert any(fnmatchcase(one, name) for one in known), (attack, file, name)
                count += 1
        assert count > 0, attack


@pytest.mark.parametrize("row", list(rows(SECURITY, 4)), ids=lambda row: row[0].strip("`"))
def test_security_page_constants_match_the_code(row: list[str]) -> None:
    name, value, _, file = (cell.strip("`") for cell in row)
    assert constant(file, name) == value_of(value)


def test_security_page_lists_all_constants_it_names() -> None:
    listed = {row[0] for row in rows(SECURITY, 4)}
    named = set(re.findall(r"`(?:k[A-Z]\w+|CONNECTION\w+)`", SECURITY))
    assert len(listed) > 20
    assert named == {name for name in listed if name.strip("`")[0] in "kC"}


# ---- PROTOCOL.md


def section(heading: str) -> str:
    found = re.search(
        rf"^## {re.escape(heading)}.*?(?=^## |\Z)", PROTOCOL, re.MULTILINE | re.DOTALL
    )
    assert found is not None, heading
    return found[0]


VERSIONS = [
    ("Pool head", "csrc/wire/pool_record.h", "kPoolVersion", 2),
    ("Data connection of a link", "csrc/wire/pool_record.h", "kPieceVersion", 1),
    ("Blob message", "csrc/wire/blob_record.h", "kBlobVersion", 1),
    ("Control message", "csrc/wire/control_record.h", "kControlVersion", 1),
    ("Message to a process that makes", "csrc/wire/job_record.h", "kJobVersion", 1),
    ("Message from a process that makes", "csrc/wire/job_record.h", "kJobVersion", 1),
    ("Message between a server and its warm", "csrc/wire/job_record.h", "kJobVersion", 1),
    ("Batch record", "csrc/wire/frame.h", "kFrameVersion", 1),
]


@pytest.mark.parametrize(("heading", "file", "name", "count"), VERSIONS)
def test_protocol_versions_match_the_code(heading: str, file: str, name: str, count: int) -> None:
    said = [int(number) for number in re.findall(r"version \((\d+)\)", section(heading))]
    assert said == [constant(file, name)] * count


SIZES = [
    ("Pool head", r"A head to a worker has (\d+) bytes", "pool_record", "kToWorkerHeadBytes"),
    ("Pool head", r"one to a trainer (\d+)\.", "pool_record", "kToTrainerHeadBytes"),
    ("Data connection", r"a head of (\d+) bytes", "pool_record", "kPieceHeadBytes"),
    ("Data connection", r"a tag of (\d+) bytes", "pool_record", "kSealTagBytes"),
    ("Blob message", r"Blob message: (\d+) bytes", "blob_record", "kBlobRecordBytes"),
    ("Connections of a pool", r"parts of a message \| (\d+)", "message", "kPartCountMax"),
    ("Processes of a pool", r"at most (\d+) bytes, 8", "job_record", "kFromJobHeadBytes"),
    ("Processes of a pool", r"and (2\^\d+) bytes of it", "job_record", "kJobBatchBytesMax"),
    ("Message to a process", r"makes batches: (\d+) bytes", "job_record", "kToJobHeadBytes"),
    ("Message to a process", r"it names, at most (\d+)", "pool_record", "kRequestBlobCountMax"),
    ("Message from a process", r"batches: (\d+) bytes", "job_record", "kFromJobHeadBytes"),
    ("Message from a", r"included, at most (2\^\d+)", "pool_record", "kPoolPayloadBytesMax"),
    ("Message between a server", r"process: (\d+) bytes", "job_record", "kWarmHeadBytes"),
    ("Message between", r"most ([\d,]+)\s+bytes\. Of", "job_record", "kAboutBytesMax"),
    ("Message between", r"most ([\d,]+) bytes: the", "job_record", "kLogNameBytesMax"),
    ("Batch record", r"comes to at most (\d+) times", "frame", "kWholeFactorMax"),
    ("Batch record", r"it has at most (\d+) times as many", "frame", "kWidenFactorMax"),
    ("Batch record", r"([\d,]+) bytes for the object of", "frame", "kTensorObjectBytes"),
    ("Batch record", r"repeats, have at most (2\^\d+)\s", "frame", "kElementBytesMax"),
    ("Batch record", r"u32 tensor\s+count \(at most ([\d,]+)\)", "frame", "kTensorCountMax"),
    ("Batch record", r"payload bytes \(at most (2\^\d+)\)", "frame", "kPayloadBytesMax"),
    ("Nest", r"at most (\d+) levels", "nest", "kNestDepthMax"),
]  # fmt: skip


@pytest.mark.parametrize(("heading", "words", "file", "name"), SIZES)
def test_protocol_sizes_match_the_code(heading: str, words: str, file: str, name: str) -> None:
    found = re.findall(words, section(heading))
    assert [value_of(number) for number in found] == [constant(f"csrc/wire/{file}.h", name)]


def test_protocol_magic_numbers_match_the_code() -> None:
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    in_code = set(re.findall(r'[Mm]agic = (0x[0-9a-f]{8});\s+// "(\w{4})"', code))
    said = {
        (number, text) for text, number in re.findall(r"`(P\w{3})` \((0x[0-9a-f]{8})\)", PROTOCOL)
    }
    assert len(said) > 8
    for number, text in said:
        assert int(number, 16).to_bytes(4, "little").decode() == text
    assert said == in_code


def test_protocol_examples_have_current_versions() -> None:
    control = constant("csrc/wire/control_record.h", "kControlVersion")
    assert re.findall(r"`50 4e 43 31  (\w\w) 00  09", PROTOCOL) == [f"{control:02x}"]
    job = constant("csrc/wire/job_record.h", "kJobVersion")
    assert re.findall(r"50 4e 48 31  (\w\w) 00  05", PROTOCOL) == [f"{job:02x}"]
    assert re.findall(r"50 4e 4a 31  (\w\w) 00  0a", PROTOCOL) == [f"{job:02x}"]
    blob = constant("csrc/wire/blob_record.h", "kBlobVersion")
    assert re.findall(r"50 4e 42 31  (\w\w) 00  01", PROTOCOL) == [f"{blob:02x}"]


JOB_HOST = [
    (r"or (\d+ s) after its trainer", "kJobLinger"),
    (r"has (\d+ s) to leave by itself", "kJobEndGrace"),
    (r"is kept for (\d+ s) beside", "kJobParked"),
    (r"has (\d+ s) to\s+answer a fork", "kForkMax"),
    (r"more than (\d+ MiB) is in a file", "kInlineBlobBytesMax"),
]


@pytest.mark.parametrize(("words", "name"), JOB_HOST)
def test_protocol_job_limits_match_the_code(words: str, name: str) -> None:
    found = re.findall(words, PROTOCOL)
    assert [value_of(number) for number in found] == [constant("csrc/server/job_host.h", name)]
