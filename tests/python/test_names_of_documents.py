# SPDX-License-Identifier: Apache-2.0
"""Every name that a document quotes as code exists, and the maps list every room.

``find_stale`` looks up the names in each code span outside of code blocks: files and folders by
their paths, options among the options of the sources, other names among their identifiers, `A::b`
and `a.b` in one file that has both, and `f()` among the names that are called. Comments, docstrings
and plain words inside of longer strings do not count. OUTSIDE lists the names of other programs.
"""

from __future__ import annotations

import builtins
import keyword
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

import pytest

THIS = Path(__file__).resolve()
ROOT = THIS.parents[2]
FOLDERS = (
    *(".ci", ".github", ".make", "bench", "cmake", "csrc", "deploy", "docs", "examples"),
    *("python", "simulator", "tests", "third_party"),
)
# It describes former versions, and may use their names.
HISTORY = "CHANGELOG.md"

# Names that documents quote and no source uses, by their owner. `a` stands for `a.b` and `a()`.
OUTSIDE: dict[str, str] = {
    "accelerate": "--cpu",
    "aiohttp": "trust_env",
    "Python packaging": "--sdist manylinux_2_35",
    "Cachew": "scaling_utils.cc",
    "CMake": "add_subdirectory LIBTORCH",
    "a repository on GitHub": "msr-fiddle/synergy",
    "libzmq": "ZMQ_ZAP_ENFORCE_DOMAIN",
    "Lightning": "RichProgressBar",
    "Linux": "net page-faults perf ssh",
    "MKL": "MKL_*",
    "Nsight Systems": "nsys nvtx",
    "Ray Data": """concurrency_solver.py from_items local_shuffle_buffer_size
        rate_based_cluster_autoscaler.py ray.train.get_dataset_shard""",
    "Slurm": "GraceTime SlurmdTimeout sacct",
    "systemd": "Delegate",
    "tf.data service": """ShardingPolicy auto_scaler.cc consumer_index
        fault_tolerant_mode from_tensor_slices interleave
        num_consumers work_dir""",
    "torch": """CUDA_LAUNCH_BLOCKING _data_queue _index_queues
        _worker_result_queue cuda pymp-*/sock-* torch._utils._rebuild_sparse_tensor
        torch::inductor::AOTIModelPackageLoader torch::nativert x.cuda""",
    "an installed penstock": """lib/torch_2_15 penstock/lib/torch_2_15 penstock/lib/licences
        torch_2_15/penstock.pc""",
    "penstock, composed when it runs": "penstock/compute_s penstock/step_s penstock/wire_s",
    "placeholders": """MODEL.pt ROLE cpuN keys-of-ann keys/ann.user.public
        keys/beta.machine.public penstock-UID""",
    "words of formats in PROTOCOL.md": "drew qualified",
    # test_security_documents.py compares them with the code.
    "magic numbers": "PNB1 PNH1 PNJ1 PNK1 PNL1 PNO1 PNW1",
}
OTHERS = frozenset(" ".join(OUTSIDE.values()).split())
# Folders that commands make.
MADE = ("build/", "bench/out/")
NO_SOURCES = {"__pycache__", "out", "penstock.egg-info", "penstock_simulator.egg-info"}

SCRIPTS = (".py", ".pyi")
NATIVE = (".h", ".cpp", ".cu", ".js")
PLAIN = (
    *("", ".sh", ".cmake", ".txt", ".in", ".toml", ".yml", ".yaml", ".json", ".html", ".css"),
    *(".map", ".pml", ".sed", ".service", ".sbatch", ".env"),
)
BUILT_IN = frozenset([*dir(builtins), *keyword.kwlist, *sys.stdlib_module_names])

FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
INDENTED = re.compile(r"(?:^|(?<=\n\n))(?: {4}.*\n|\n(?= {4}))+", re.MULTILINE)
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)

# Parts of spans that are no names: addresses, system paths, bytes, the -D of cmake, leading ./
NO_NAMES = re.compile(
    r"\b[a-z]+://\S*|\b[\w.-]+\.(?:com|org)\b\S*|\b\d+(?:\.\d+){3}\S*"
    r"|(?<![\w.])(?:/(?:dev|etc|proc|run|sys|tmp|var)\b|~/|\$)\S*"
    r"|^[0-9a-f]{2}(?: +[0-9a-f]{2})+$|(?<!\S)-D|(?<!\w)(?:\.\.?/)+"
)
# Numbers, and options of one letter.
NO_NAME = re.compile(r"\d|-\w")
COMMAND = re.compile(r"(?<!\S)(?:make|penstock) [a-z][\w-]*")
# Parts of names: `WorkersThatWait...`, and `-k words` of pytest.
SELECTED = re.compile(r"-k (\w+)")
ABBREVIATED = re.compile(r"(?<=\w{8})\.\.\.")
NAME = re.compile(r"--[a-z][\w-]*|/?[\w*.-]*[\w*](?:(?:::|/|-)[\w*.-]*[\w*])*(?:/|\(\))?", re.ASCII)
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
CALL = re.compile(r"[A-Za-z_]\w*(?=\s*[(<])", re.ASCII)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Identifiers that no sentence contains: with underscores, digits or capitals inside.
FORMED = re.compile(r"\w*(?:[a-z0-9_][A-Z_0-9]|[A-Z_0-9][A-Z_0-9]|_[a-z])\w*", re.ASCII)

# Comments and strings of a source.
SCRIPT_PART = re.compile(
    r'(?P<note>#[^\n]*|(?:^|(?<=\n))[ \t]*[rbf]{0,2}"""(?:.*?)""")'
    r'|[rbf]{0,2}(?P<mark>"""|\'\'\')(?P<block>.*?)(?P=mark)'
    r'|"(?P<text>(?:[^"\\\n]|\\.)*)"|\'(?P<word>(?:[^\'\\\n]|\\.)*)\'',
    re.DOTALL,
)
NATIVE_PART = re.compile(
    r'(?P<note>//[^\n]*|/\*.*?\*/)|R"(?P<mark>\w*)\((?P<block>.*?)\)(?P=mark)"'
    r"|\"(?P<text>(?:[^\"\\\n]|\\.)*)\"|(?<!\w)'(?P<word>(?:[^'\\\n]|\\.)*)'",
    re.DOTALL,
)


@dataclass(frozen=True)
class Source:
    """One file: its text without comments, and the words in it that are evidence of a name."""

    text: str
    words: frozenset[str]
    calls: frozenset[str]


def read_source(suffix: str, text: str) -> Source:
    part = SCRIPT_PART if suffix in SCRIPTS else NATIVE_PART if suffix in NATIVE else None
    words: set[str] = set()

    def keep_words(found: re.Match[str]) -> str:
        if found["note"]:
            return " "
        quoted = found["block"] or found["text"] or found["word"] or ""
        if re.search(r"\s", quoted):
            words.update(FORMED.findall(quoted))
        else:
            words.update([quoted, *WORD.findall(quoted)])
        strings.append(quoted)
        return '""'

    strings: list[str] = []
    code = part.sub(keep_words, text) if part else text
    words.update(WORD.findall(code))
    text = "\n".join([code, *strings])
    return Source(text, frozenset(words), frozenset(CALL.findall(text)))


@dataclass(frozen=True)
class Tree:
    """The paths of a tree, and its sources."""

    root: Path
    paths: tuple[str, ...]
    sources: Mapping[str, Source] = field(repr=False)

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of all sources, and the names of files and folders, also without suffixes."""
        parts = {part for path in self.paths for part in path.split("/")}
        stems = {part.partition(".")[0] for part in parts}
        return frozenset(parts | stems).union(*(source.words for source in self.sources.values()))

    @cached_property
    def calls(self) -> frozenset[str]:
        return frozenset[str]().union(*(source.calls for source in self.sources.values()))

    @cached_property
    def options(self) -> frozenset[str]:
        return frozenset(o for source in self.sources.values() for o in OPTION.findall(source.text))

    @cached_property
    def commands(self) -> frozenset[str]:
        """`penstock up`, `make test` and the like."""
        found = set()
        for path, start, pattern in (
            ("Makefile", "make", r"^([\w-]+):"),
            ("python/penstock/cli/command_line.py", "penstock", r'^    "([\w-]+)": Command\('),
        ):
            if path in self.paths:
                text = (self.root / path).read_text(encoding="utf-8")
                found |= {f"{start} {name}" for name in re.findall(pattern, text, re.MULTILINE)}
        return frozenset(found)

    @cached_property
    def ends_of_paths(self) -> frozenset[str]:
        """Each file and folder, relative to any parent folder; files also without suffixes."""
        found = set()
        for path in self.paths:
            parts = path.split("/")
            for start in range(len(parts)):
                for stop in range(start + 1, len(parts) + 1):
                    found.add("/".join(parts[start:stop]))
                found.add("/".join([*parts[start:-1], parts[-1].partition(".")[0]]))
        return frozenset(found)

    def has_text(self, text: str) -> bool:
        return any(text in source.text for source in self.sources.values())


def read_tree(root: Path) -> Tree:
    """Read the files of the project below a folder, except this one, whose names are made up."""
    files = [path for path in root.iterdir() if path.is_file()]
    for folder in FOLDERS:
        files += [path for path in (root / folder).rglob("*") if path.is_file()]
    paths = {path.relative_to(root).as_posix(): path for path in sorted(files)}
    paths = {name: path for name, path in paths.items() if NO_SOURCES.isdisjoint(name.split("/"))}
    sources = {
        name: read_source(path.suffix, path.read_text(encoding="utf-8", errors="replace"))
        for name, path in paths.items()
        if path.suffix in (*SCRIPTS, *NATIVE, *PLAIN) and name != "LICENSE" and path != THIS
    }
    return Tree(root, tuple(paths), sources)


@dataclass(frozen=True, order=True)
class Stale:
    document: str
    line: int
    span: str
    name: str

    def __str__(self) -> str:
        return (
            f"{self.document}:{self.line}: `{self.span}`: the tree has no {self.name}; write its "
            "present name, or add it to OUTSIDE if it belongs to another program"
        )


def spans_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the code spans of a document outside of code blocks, with their line numbers."""
    for pattern in (FENCED, HIDDEN, INDENTED):
        text = pattern.sub(lambda found: "\n" * found[0].count("\n"), text)
    for paragraph in re.finditer(r"(?:.+\n?)+", text):
        for found in SPAN.finditer(paragraph[0]):
            line = text.count("\n", 0, paragraph.start() + found.start()) + 1
            yield line, " ".join(found[2].split())


def names_of(span: str) -> list[str]:
    plain = SELECTED.sub(r"*\1*", ABBREVIATED.sub("*", NO_NAMES.sub(" ", span)))
    names = [name for name in NAME.findall(COMMAND.sub(" ", plain)) if WORD.search(name)]
    return [*COMMAND.findall(plain), *(name for name in names if not NO_NAME.match(name))]


def find_stale(tree: Tree, documents: Iterable[str]) -> list[Stale]:
    """Return the names in code spans of the documents that the tree does not have.

    A document's code blocks may define names, too.
    """
    found = []
    for document in documents:
        text = (tree.root / document).read_text(encoding="utf-8")
        blocks = "".join(block[0] for block in FENCED.finditer(text))
        own = {*NAME.findall(blocks), *WORD.findall(blocks)}
        for line, span in spans_of(text):
            unknown = [name for name in names_of(span) if not is_known(name, tree)]
            stale = [name for name in unknown if name.strip(".()") not in own]
            # A sentence or a format may be in a source as it is.
            if stale and not (" " in span and tree.has_text(span)):
                found += [Stale(document, line, span, name) for name in stale]
    return sorted(found)


def is_known(name: str, tree: Tree) -> bool:
    plain = name.removesuffix("()")
    if " " in name:
        return name in tree.commands
    if name.startswith("--"):
        return name in tree.options
    if name.startswith(MADE):
        return True
    if "*" in name:
        places = tree.ends_of_paths if "/" in name else tree.words
        return any(fnmatchcase(place, name) for place in places)
    if "/" in name:
        return is_path(name, tree)
    if plain in BUILT_IN or len(plain.strip(".")) == 1:
        return True
    if name.endswith("()") and parts_of(plain)[-1] not in tree.calls:
        return False
    if plain in tree.words:
        return True
    if "-" in plain:
        return tree.has_text(plain)
    return plain != "".join(parts_of(plain)) and is_member(parts_of(plain), tree)


def parts_of(name: str) -> list[str]:
    return [part for part in re.split(r"::|\.", name) if part]


def owned_by_others(name: str) -> str | None:
    """Return the entry of OUTSIDE for a name; None if there is none."""
    plain = name.removesuffix("()").strip("/")
    candidates = (plain, plain.lstrip("."), *parts_of(plain)[:1])
    return next((one for one in candidates if one in OTHERS), None)


def is_path(name: str, tree: Tree) -> bool:
    """Whether it is a file, a folder, or a name such as `kind/case` whose parts are known."""
    if name.strip("/") in tree.ends_of_paths or tree.has_text(name):
        return True
    parts = name.strip("/").split("/")
    is_place = parts[0] in tree.ends_of_paths or "." in parts[-1] or name.startswith("/")
    return not is_place and all(part in tree.words for part in parts)


def is_member(parts: list[str], tree: Tree) -> bool:
    """Whether a file has all parts of a dotted name, its path included."""
    for path, source in tree.sources.items():
        places = {place.partition(".")[0] for place in path.split("/")}
        if all(part in source.words or part in places for part in parts):
            return True
    return False


# ---- the checks of this tree


@pytest.fixture(scope="module")
def tree() -> Tree:
    return read_tree(ROOT)


@pytest.fixture(scope="module")
def stale(tree: Tree) -> list[Stale]:
    """Unknown names, including the names in OUTSIDE."""
    documents = [path for path in tree.paths if path.endswith(".md") and path != HISTORY]
    assert {"README.md", "csrc/README.md", "docs/how-to/pools.md"} <= set(documents)
    return find_stale(tree, documents)


@pytest.mark.slow
def test_names_of_documents_exist(stale: list[Stale]) -> None:
    faults = [str(one) for one in stale if not owned_by_others(one.name)]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_names_of_other_programs_are_still_needed(stale: list[Stale]) -> None:
    needed = {owned_by_others(one.name) for one in stale}
    assert sorted(OTHERS - needed) == []


@pytest.mark.slow
def test_tables_of_files_list_files(tree: Tree) -> None:
    documents = [path for path in tree.paths if path.endswith("README.md")]
    listed = {path: list(first_cells(ROOT / path, "file")) for path in documents}
    assert sum(map(len, listed.values())) > 100
    missing = {
        f"{path}: `{name}` is no file of this folder"
        for path, names in listed.items()
        for name in names
        if not list((ROOT / path).parent.glob(f"{name}*"))
    }
    assert sorted(missing) == []


def test_room_readme_with_file_table_names_every_file() -> None:
    missing = []
    for page in sorted((ROOT / "csrc").glob("*/README.md")):
        names = [name for _, span in spans_of(page.read_text("utf-8")) for name in names_of(span)]
        stems = {name.rpartition("/")[2].partition(".")[0] for name in names}
        files = {path.stem for path in page.parent.iterdir() if path.suffix in NATIVE}
        if any(first_cells(page, "file")):
            missing += [f"{page.relative_to(ROOT)}: {name}" for name in sorted(files - stems)]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "head"), [("csrc", "room"), ("python/penstock", "package")])
def test_maps_list_exactly_the_rooms(tree: Tree, folder: str, head: str) -> None:
    """The map of the façade may also list modules."""
    listed = list(first_cells(ROOT / folder / "README.md", head))
    assert len(listed) == len(set(listed))
    inside = [path.removeprefix(f"{folder}/") for path in tree.sources if path.startswith(folder)]
    rooms = {path.partition("/")[0] for path in inside if "/" in path}
    modules = {path.removesuffix(".py") for path in inside if path.endswith(".py")}
    assert sorted(rooms - set(listed)) == []
    assert sorted(set(listed) - rooms - modules) == []


def first_cells(page: Path, head: str) -> Iterator[str]:
    """Yield the code spans in the first column of each table whose first heading is ``head``."""
    is_inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) < 3 or cells[0]:
            is_inside = False
        elif is_inside:
            yield from re.findall(r"`([^`]+)`", cells[1])
        else:
            is_inside = cells[1].strip() == head


# ---- the checker, with planted names

PLANTED = {
    "Makefile": "test:\n",
    "csrc/loader/stream.h": """
// Formerly class Faucet.
class Stream { void drop_rest(Order order); static constexpr int kDepthMax = 4; };
""",
    "csrc/loader/order.h": "class Order { bool is_full; };  // drop_all()\n",
    "python/penstock/cli/command_line.py": """
COMMANDS = {
    "up": Command("elastic_commands", "run a pool"),
}
""",
    "python/penstock/compat/storages.py": '''
"""Formerly seams."""
def rebuild_storage(storage):
    parser.add_argument("--first-batch", help="how far the lookahead goes")
    return os.environ["PENSTOCK_POOL"]
''',
}


@pytest.fixture
def planted(tmp_path: Path) -> Tree:
    for name, text in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_tree(tmp_path)


def stale_in(planted: Tree, text: str) -> list[Stale]:
    (planted.root / "README.md").write_text(text, encoding="utf-8")
    return find_stale(planted, ["README.md"])


@pytest.mark.parametrize(
    "span",
    [
        *("Stream", "Stream::drop_rest", "drop_rest()", "Stream.drop_rest(order)", "kDepthMax"),
        *("csrc", "loader", "csrc/loader/", "loader/stream.h", "../loader/stream.h", "stream.h"),
        *("loader/stream", "stream", "compat", "storages.py", "compat.storages", "Makefile"),
        *("rebuild_storage", "storages.rebuild_storage()", "rebuild_*", "rebuild_s..."),
        *("--first-batch", "--first-batch 3", "PENSTOCK_POOL", "PENSTOCK_POOL=tcp://host:7000"),
        *("penstock up", "python -m penstock up --first-batch 3", "make test"),
        *("isinstance", "None", "build/fuzz/found", "/proc/self/fd", "10.0.0.5:9000", "50 4e 43"),
        *("how far the lookahead goes", "?", "0.5"),
    ],
)
def test_existing_name_is_not_stale(planted: Tree, span: str) -> None:
    assert stale_in(planted, f"It is `{span}`.\n") == []


@pytest.mark.parametrize(
    ("span", "name"),
    [
        ("Faucet", "Faucet"),  # named only in a comment
        ("drop_all()", "drop_all()"),
        ("seams", "seams"),
        ("lookahead", "lookahead"),  # a word in a sentence
        ("Stream::is_full", "Stream::is_full"),  # each is there, in separate files
        ("kDepthMax()", "kDepthMax()"),  # not called
        ("loader/tap.h", "loader/tap.h"),
        ("seams/storages.py", "seams/storages.py"),
        ("loader/order.cpp", "loader/order.cpp"),
        ("loader/tap", "loader/tap"),
        ("compa.storages", "compa.storages"),
        ("drop_rest(tap)", "tap"),
        ("restore_*", "restore_*"),
        ("--second-batch", "--second-batch"),
        ("penstock up --second-batch 3", "--second-batch"),
        ("PENSTOCK_POND=tcp://host:7000", "PENSTOCK_POND"),
        ("penstock down", "penstock down"),
        ("make chaos", "make chaos"),
    ],
)
def test_unknown_name_is_reported_as_stale(planted: Tree, span: str, name: str) -> None:
    (stale,) = stale_in(planted, f"It is\n`{span}`.\n")
    assert stale == Stale("README.md", 2, span, name)


def test_stale_name_message_has_location_and_remedy(planted: Tree) -> None:
    (stale,) = stale_in(planted, "# Title\n\nSince then, `kDepthMin` applies.\n")
    assert str(stale) == (
        "README.md:3: `kDepthMin`: the tree has no kDepthMin; write its present name, or add it to "
        "OUTSIDE if it belongs to another program"
    )


def test_spans_have_line_numbers_and_skip_code_blocks() -> None:
    text = """# A `title`

Some `words
over lines` and ``a `quoted` span``.

    a drawing with `ticks`

- an item with `a name`

```python
x = "`y`"
```

<!-- `hidden` -->
| a | `cell` |
"""
    assert list(spans_of(text)) == [
        (1, "title"),
        (3, "words over lines"),
        (4, "a `quoted` span"),
        (8, "a name"),
        (15, "cell"),
    ]


def test_code_block_defines_names_for_its_document(planted: Tree) -> None:
    block = "```python\nclass Reader: ...\n```\n"
    assert stale_in(planted, f"{block}\n`Reader` reads.\n") == []
    assert len(stale_in(planted, "`Reader` reads.\n")) == 1


def test_first_cells_selects_tables_by_heading(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(
        "| room | of |\n| --- | --- |\n| `base`, `wire` | `x` |\n\n"
        "| file | of |\n| --- | --- |\n| `a` | b |\n"
    )
    assert list(first_cells(page, "room")) == ["base", "wire"]
    assert list(first_cells(page, "file")) == ["a"]
