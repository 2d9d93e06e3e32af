"""A folder includes only folders below it, third-party libraries are used where the design says, documents
name things that exist, names lead to one place, and lines are no wider than agreed."""
import collections, glob, io, os, re, subprocess, sys, tokenize
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

RANKS = {"base": 0, "proto/wire": 1, "model": 2, "grammar": 2, "kernels": 2, "transfer": 2, "sched": 2, "proto/rpc": 2, "proto/ask": 2, "engine": 3,
         "worker": 4, "router": 5, "gateway": 5, "prefill": 5, "decode": 5, "kvstore": 5, "replay": 6, "cli": 7, "bench": 8}
LIBRARIES = {r"ucp/|ucs/|uct/": r"^transfer/wire_ucx|^bench/transfer_bare", r"rocksdb/": r"^kvstore/ssd(_internal\.h|_room\.c|\.c)$",
             r"grpc/": r"^proto/rpc/", r"http_parser\.h": r"^gateway/http_reader\.h$", r"cuda|cublas": r"^kernels/cuda/"}


def folder(path):
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "proto" and parts[1] in ("wire", "rpc", "ask") else parts[0]


def documents():
    return [*glob.glob(os.path.join(SOURCE, "docs", "*.md")), os.path.join(SOURCE, "README.md")]


def sources():
    for top in {r.split("/")[0] for r in RANKS}:
        for d, _, files in os.walk(os.path.join(SOURCE, top)):
            for f in files:
                if f.endswith((".c", ".h", ".cc", ".cu", ".cuh")):
                    yield os.path.relpath(os.path.join(d, f), SOURCE)


@test
def test_includes_point_downwards():
    up, n = [], 0
    for path in sources():
        for name in re.findall(r'^#include "([^"]+)"', open(os.path.join(SOURCE, path)).read(), re.M):
            mine, other = folder(path), folder(name)
            if other not in RANKS or mine == other:
                continue
            n += 1
            if RANKS[other] >= RANKS[mine]:
                up.append(f"{path} includes {name}")
    print(f"# {n} includes across folders, {len(up)} upwards")
    assert n > 50 and not up, up


@test
def test_libraries_are_seen_where_the_design_says():
    wrong = []
    for path in sources():
        for name in re.findall(r"^#include <([^>]+)>", open(os.path.join(SOURCE, path)).read(), re.M):
            for library, where in LIBRARIES.items():
                if re.match(library, name) and not re.match(where, path):
                    wrong.append(f"{path} includes <{name}>")
    assert not wrong, wrong


@test
def test_tests_that_documents_name_exist():
    """`test_name`, `test_begins_so_...`, `test_file.py`, and `..._which_goes_on_so`."""
    names, files = set(), set()
    for d, _, found in os.walk(os.path.join(SOURCE, "tests")):
        for f in found:
            files.add(f)
            if f.endswith((".c", ".h", ".py")):
                text = open(os.path.join(d, f), errors="replace").read()
                names.update(re.findall(r"START_TEST\((\w+)\)", text) + re.findall(r"^def (test_\w+)", text, re.M))
    wrong, n = [], 0
    for path in documents():
        for whole in re.findall(r"`((?:[a-z]+/)*(?:test_\w+|\.\.\._\w+)(?:\.\.\.|\.c|\.py)?)`", open(path).read()):
            n += 1
            name = whole.rsplit("/", 1)[-1]
            begin, middle = name.rstrip("."), name.strip(".")
            there = (name in files if name.endswith((".c", ".py")) else any(middle in x for x in names) if name.startswith("...") else
                     any(x.startswith(begin) for x in names) if name.endswith("...") else name in names or name + ".c" in files
                     or name + ".py" in files)
            if not there:
                wrong.append(f"{os.path.basename(path)}: {whole}")
    assert n > 50 and not wrong, (n, wrong)


@test
def test_paths_that_documents_name_exist():
    """A path may be a pattern. Shared objects are built, and not by every configuration."""
    tops = "|".join(d for d in os.listdir(SOURCE) if os.path.isdir(os.path.join(SOURCE, d)) and d not in (".git", "build"))
    wrong, n = [], 0
    for path in documents():
        for name in re.findall(rf"(?<![\w/.~$-])((?:{tops})/[\w./{{}}*,-]*)", open(path).read()):
            n += 1
            name = name.rstrip(".,:")
            if not name.endswith(".so") and not glob.glob(os.path.join(SOURCE, name)):
                wrong.append(f"{os.path.basename(path)}: {name}")
    print(f"# {n} paths")
    assert n > 100 and not wrong, (n, wrong)


@test
def test_the_drawing_of_a_cluster_is_what_its_script_draws():
    plots = os.path.join(SOURCE, "docs", "plots")
    drawn = subprocess.run([sys.executable, os.path.join(plots, "cluster.py")], capture_output=True, text=True)
    with open(os.path.join(plots, "cluster.svg")) as f:
        assert drawn.returncode == 0 and drawn.stdout == f.read(), drawn.stderr or "run docs/plots/cluster.py > docs/plots/cluster.svg"


@test
def test_tags_are_unique():
    """A struct, union or enum tag is defined in one file, so that a search finds one thing."""
    defined = {}
    for path in sources():
        for tag in re.findall(r"^(?:typedef |static |const )*(?:struct|enum|union) (\w+) \{", open(os.path.join(SOURCE, path)).read(), re.M):
            defined.setdefault(tag, set()).add(path)
    # declared by a header and defined by each backend, or each instruction set
    each_its_own = {"k_matrix", "k_stack", "int4_scales", "vpair"}
    twice = {tag: sorted(paths) for tag, paths in defined.items() if len(paths) > 1 and tag not in each_its_own}
    print(f"# {len(defined)} tags")
    assert len(defined) > 500 and not twice, twice


def archive_symbols():
    """(archive, stem of the source file, name) of each external symbol that our sources define."""
    for top in {r.split("/")[0] for r in RANKS}:
        for d, _, files in os.walk(os.path.join(BUILD, top)):
            for path in (os.path.join(d, f) for f in files if f.endswith(".a")):
                out = subprocess.run(["nm", "--extern-only", "--defined-only", "--print-file-name", path], capture_output=True, text=True)
                assert out.returncode == 0, out.stderr
                for stem, name in re.findall(r"([\w.-]+)\.\w+\.o: *\S* [TDBR] (\S+)$", out.stdout, re.M):
                    yield os.path.relpath(path, BUILD), stem, name


@test
def test_no_two_archives_define_one_symbol():
    """A program that links both would silently call one where the other is meant."""
    defined = {}
    for archive, _, name in archive_symbols():
        defined.setdefault(name, set()).add(archive)
    twice = {name: sorted(archives) for name, archives in defined.items() if len(archives) > 1}
    print(f"# {len(defined)} symbols of archives")
    assert len(defined) > 500 and not twice, twice


@test
def test_external_functions_carry_a_prefix():
    """Their first word is one of their file's or folder's, a tag's first or last word, or shared in their
    library."""
    text = "".join(open(os.path.join(SOURCE, path)).read() for path in sources())
    tags = {word for tag in re.findall(r"\b(?:struct|enum|union) (\w+)", text) for word in (tag, tag.split("_")[0], tag.split("_")[-1])}
    symbols = [(archive, stem, name, name.lower().removeprefix("n_").split("_")[0])
               for archive, stem, name in archive_symbols() if "pb-c" not in stem]
    shared = collections.Counter((archive, word) for archive, _, _, word in symbols)
    bare = [f"{archive}: {name}" for archive, stem, name, word in symbols
            if not {word, word + "s", word.removesuffix("s")} & (tags | set(re.split(r"[/_.-]", archive + "/" + stem)))
            and shared[archive, word] < 2]
    print(f"# {len(symbols)} symbols")
    assert len(symbols) > 500 and not bare, bare


def c_prose(lines):
    """Numbers of the lines that have nothing but comment."""
    prose, inside = set(), False
    for n, line in enumerate(lines, 1):
        rest = line if inside else re.sub(r'"(?:\\.|[^"\\])*"', '""', line)
        code = ""
        while rest:
            begin, mark, rest = rest.partition("*/" if inside else "/*")
            code += "" if inside else begin
            inside ^= bool(mark)
        if not code.strip() or code.lstrip().startswith("//"):
            prose.add(n)
    return prose


def python_prose(lines):
    """Numbers of the lines of comments and docstrings, and of the lines of nothing but literals."""
    prose, kinds, begins = set(), collections.defaultdict(set), True
    for t in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
        rows = range(t.start[0], t.end[0] + 1)
        if t.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif t.type == tokenize.COMMENT or (t.type == tokenize.STRING and begins):
            prose.update(rows if not t.line[:t.start[1]].strip() else ())
        elif t.type != tokenize.NL:
            is_literal = t.type in (tokenize.STRING, tokenize.NUMBER) or t.string in "()[]{},:-+" or t.string in ("True", "False", "None")
            for row in rows:
                kinds[row].add(is_literal)
        begins &= t.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT)
    return prose, {row for row, k in kinds.items() if k == {True}}


WIDE = ("tests/cluster/", "tests/gateway/", "tests/clients/", "tests/grammar/", "tests/model/", "deploy/demo-model/")


def too_wide(path, lines):
    """Numbers of the lines that are wider than CONTRIBUTING.md says. Tables of data and addresses may be."""
    data, code = set(), 120
    if path.endswith(".md"):
        prose = {n for n, line in enumerate(lines, 1) if not line.startswith("    ")}
        data = {n for n, line in enumerate(lines, 1) if line.startswith(("|", "!["))}
    elif path.endswith(".py"):
        prose, data = python_prose(lines)
        code = 150 if path.startswith(WIDE) else 120
    elif path.endswith((".sh", ".proto")):
        prose = {n for n, line in enumerate(lines, 1) if line.lstrip().startswith(("#", "//"))}
    else:
        prose = c_prose(lines)
    return [n for n, line in enumerate(lines, 1)
            if len(line) > (110 if n in prose else code) and n not in data and "://" not in line]


@test
def test_lines_are_no_wider_than_agreed():
    """Comments and documents: 110 columns. Code: 120; in cluster tests, and scripts that make data, 150."""
    tops = {r.split("/")[0] for r in RANKS} | {"tests", "deploy", "docs", "clients"}
    paths = [os.path.join(d, f) for top in tops for d, _, files in os.walk(os.path.join(SOURCE, top)) for f in files]
    wrong, n = [], 0
    for path in paths + glob.glob(os.path.join(SOURCE, "*.md")):
        name = os.path.relpath(path, SOURCE)
        # The demo model's card is printed by a script.
        if name.endswith((".md", ".c", ".h", ".cc", ".cu", ".cuh", ".py", ".sh", ".proto")) and "/tandem-demo/" not in name:
            with open(path, encoding="utf-8") as f:
                lines = f.read().splitlines()
            n += len(lines)
            wrong += [f"{name}:{at}: {len(lines[at - 1])} columns" for at in too_wide(name, lines)]
    print(f"# {n} lines")
    assert n > 50000 and not wrong, wrong


@test
def test_width_of_a_line_goes_by_what_it_has():
    wide, wider = "x" * 107, "x" * 118
    for name, line, fits in (("a.c", "/* " + wide + " */", False), ("a.c", "    x = 1; /* " + "x" * 100, True), ("a.c", wider, True),
                             ("a.c", wider + "xxx", False), ("a.c", f'f("/* {wide} */");', True), ("a.py", "# " + wide + "xx", False),
                             ("a.py", f'"""{wide}."""', False), ("a.py", f'x = f("{wide}")', True), ("a.py", f'f("{wider}")', False),
                             ("a.py", f'["{wider}",', True), ("tests/cluster/a.py", f'f("{wider}")', True), ("a.sh", "# " + wide + "xx", False),
                             ("a.sh", wider, True), ("a.md", wide + "xxxx", False), ("a.md", "| " + wider, True), ("a.md", "    " + wide, True),
                             ("a.md", "see https://x.org/" + wider, True), ("a.proto", "// " + wide + "x", False)):
        lines = [line, "0]"] if line.startswith("[") else [line]
        assert (too_wide(name, lines) == []) == fits, (name, line)


main()
