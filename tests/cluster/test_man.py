"""Manual pages: every program and command has one, with all that its --help says, in roff that others can
read."""
import os, re, shutil, subprocess, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *

SERVERS = ["router", "gateway", "prefill", "decode", "kvstore"]
PAGES = os.path.join(BUILD, "docs")


def output(*args, **kw):
    out = subprocess.run(args, capture_output=True, text=True, timeout=60 * SLOW, **kw)
    assert out.returncode == 0, (args, out)
    return out.stdout


def commands():
    found = re.findall(r"^  (\w+) +\S", output(TANDEM, "help").split("Examples")[0], re.M)
    assert len(found) > 10, found
    return found


def programs():
    """Name of a page, and all words with which its --help is asked for."""
    for command in commands():
        yield f"tandem-{command}.1", [[TANDEM, command]]
    for name in SERVERS:
        yield f"tandem-{name}.8", [[os.path.join(BUILD, name, "tandem-" + name)]]


def helps(asked):
    """Its --help, and the helps of its words if these have options of their own."""
    for words in asked:
        text = output(*words, "--help")
        yield text
        if re.search(r"^tandem .* --help lists the options", text, re.M):
            yield from (output(*words, kind, "--help") for kind in re.findall(r"^  (\w+) +\S", text, re.M))


def page(name):
    if os.environ.get("TANDEM_SANITIZE"):
        raise Skip("builds with a sanitizer make no manual pages")
    path = os.path.join(PAGES, name)
    assert os.path.exists(path), f"{path} is missing: docs/meson.build lists the pages"
    with open(path, encoding="ascii") as f:
        return f.read()


def plain(roff):
    """The words of a page: what this test knows about roff is written down here, not taken from
    base/man.c."""
    text = re.sub(r"^\.(SH|SS) \"?(.*?)\"?$", r"\2", roff, flags=re.M)
    text = re.sub(r"^\.\w+.*$", "", text, flags=re.M)
    text = re.sub(r"\\f[BIR]|\\[&:]", "", text)
    for escape, char in (("\\(aq", "'"), ("\\(ga", "`"), ("\\(ha", "^"), ("\\(ti", "~"), ("\\(dq", '"'), ("\\-", "-")):
        text = text.replace(escape, char)
    assert not re.search(r"\\[^e]", text), re.findall(r".*\\[^e].*", text)
    return " ".join(text.replace("\\e", "\\").split())


def need_pages():
    if not os.path.isdir(PAGES):
        raise Skip("a cross build or one with sanitizers: it has no manual pages")


@test
def test_a_page_says_all_that_help_says():
    need_pages()
    n, missing = 0, []
    for name, asked in programs():
        text = plain(page(name))
        for help_text in helps(asked):
            for line in help_text.splitlines():
                row = re.match(r"  (--[\w-]+)(?: (\S+|'[^']*'))?(?:  +(.*))?$|  (\w+) +(.*)$", line)
                # The first line has the usage without the word "usage: "; a kind's own summary is in the list
                # of kinds.
                wanted = " ".join((" ".join(filter(None, row.groups())) if row else line.removeprefix("usage: ")).split())
                if line.startswith("usage: tandem trace ") or line.endswith("lists the options."):
                    continue
                n += 1
                if wanted not in text:
                    missing.append((name, wanted))
    print(f"# {n} lines")
    assert n > 400 and not missing, missing


@test
def test_the_page_of_tandem_lists_the_commands_and_points_to_every_other_page():
    need_pages()
    text = plain(page("tandem.1"))
    for line in output(TANDEM, "help").splitlines():
        if line.startswith("  "):
            assert " ".join(line.split()) in text, line
    others = [name for name, _ in programs()]
    for name in others:
        assert re.sub(r"(.*)\.(\d)", r"\1(\2)", name) in text, name
    assert sorted(f for f in os.listdir(PAGES) if re.search(r"\.\d$", f)) == sorted([*others, "tandem.1"])


@test
def test_a_page_is_found_by_its_summary():
    """man -k reads one line, NAME - SUMMARY; no two pages have the same one."""
    need_pages()
    summaries = set()
    for name in sorted(os.listdir(PAGES)):
        if re.search(r"\.\d$", name):
            line = re.search(r"^\.SH \"?NAME\"?\n(.*)\n\.SH", page(name), re.M)
            stem, dash, summary = line.group(1).partition(" \\- ")
            assert stem == name[:-2].replace("-", "\\-") and dash and 5 < len(summary) < 120, line
            summaries.add(summary)
    assert len(summaries) == len(list(programs())) + 1, summaries


def check_with(tool, *args, accept=None):
    need_pages()
    if not shutil.which(tool):
        raise Skip(f"{tool} is not installed")
    for name in sorted(os.listdir(PAGES)):
        if re.search(r"\.\d$", name):
            out = subprocess.run([tool, *args, os.path.join(PAGES, name)], capture_output=True, text=True, timeout=60 * SLOW)
            said = [line for line in (out.stdout + out.stderr).splitlines() if not accept or accept not in line]
            assert not said and (out.returncode == 0 or accept), (name, said, out)


@test
def test_groff_has_no_warning():
    check_with("groff", "-man", "-ww", "-z", "-Tutf8")


@test
def test_mandoc_has_no_warning():
    # A page has no date, so that the same sources make the same bytes.
    check_with("mandoc", "-T", "lint", "-W", "warning", accept="missing date")


main()
