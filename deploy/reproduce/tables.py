#!/usr/bin/env python3
"""The tables of docs/reproductions.md: what the scripts beside this one print, against what the document
says.

    tables.py [--update] [NAME ...]

NAME: a script without its .sh (default: all that print tables). A script prints its tables as markdown, with
the document's columns; a table is found in the document by its line of column names. Each difference is
named, and the exit code is then 1. --update writes the printed rows into the document instead; the text
around them is for somebody to read again. TANDEM, TRACE and AZURE are passed on.

Words must be equal, numbers nearly: within 1 %, or within one in the last decimal place that the document
shows. The simulator repeats its results exactly, so the same build would allow equality; but a change
anywhere in the scheduler moves low digits, and so may another machine's libm. Orders and ratios that the text
draws from a table hardly turn with 1 %.
"""
import os, re, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
DOCUMENT = os.path.join(HERE, "../../docs/reproductions.md")
QUICK = ("fig5", "fig8", "fig9", "fig10")
SLOW = ("policies", "split", "coupled", "fig15", "table3", "splitwise", "polca")
CLOSE = 0.01
NUMBER = re.compile(r"[+-]?\d+(?:,\d{3})*(?:\.\d+)?")


def tables(lines):
    """{line of column names: (number of its first row, rows)}"""
    found = {}
    for i, line in enumerate(lines):
        if re.fullmatch(r"\|[-:| ]+\|", line) and i and lines[i - 1].startswith("|"):
            end = i + 1
            while end < len(lines) and lines[end].startswith("|"):
                end += 1
            if lines[i - 1] in found:
                raise ValueError(f"two tables with these columns: {lines[i - 1]}")
            found[lines[i - 1]] = (i + 1, lines[i + 1:end])
    return found


def cells(row):
    return [c.strip() for c in row.strip("|").split("|")]


def is_close(said, printed):
    a, b = (float(n.replace(",", "")) for n in (said, printed))
    places = len(said.partition(".")[2])
    last = 10**-places if places else 0
    return abs(a - b) <= max(CLOSE * max(abs(a), abs(b)), 1.001 * last)


def is_same(said, printed):
    numbers = [NUMBER.findall(cell) for cell in (said, printed)]
    return NUMBER.sub("#", said) == NUMBER.sub("#", printed) and all(map(is_close, *numbers))


def differences(name, columns, said, printed):
    if len(said) != len(printed):
        return [f"{name}: {len(printed)} rows, the document has {len(said)}: {columns}"]
    out = []
    for a, b in zip(said, printed):
        if len(cells(a)) != len(cells(b)):
            out.append(f"{name}: the document has the row {a}, but it is {b}")
            continue
        out += [f"{name}: {column}: the document says {x}, but it is {y}, in the row {b}"
                for column, x, y in zip(cells(columns), cells(a), cells(b)) if not is_same(x, y)]
    return out


def printed_by(name):
    out = subprocess.run(["bash", os.path.join(HERE, name + ".sh")], stdout=subprocess.PIPE, text=True)
    if out.returncode:
        raise RuntimeError(f"{name}.sh ended with {out.returncode}\n{out.stdout}")
    found = tables(out.stdout.splitlines())
    if not found:
        raise RuntimeError(f"{name}.sh printed no table\n{out.stdout}")
    return found


def document():
    with open(DOCUMENT, encoding="utf-8") as f:
        return f.read().splitlines()


def check(name, update=False):
    """Runs a script; names what differs from the document, or writes it there."""
    out = []
    for columns, (_, rows) in printed_by(name).items():
        lines = document()
        if columns not in tables(lines):
            out.append(f"{name}: the document has no table with these columns: {columns}")
            continue
        first, said = tables(lines)[columns]
        if not update:
            out += differences(name, columns, said, rows)
            continue
        lines[first:first + len(said)] = rows
        with open(DOCUMENT, "w", encoding="utf-8") as f:
            f.write("\n".join(lines) + "\n")
    return out


def main():
    update, names = "--update" in sys.argv, [a for a in sys.argv[1:] if a != "--update"]
    unknown = [n for n in names if n not in QUICK + SLOW]
    if unknown:
        sys.exit(f"tables.py: there is no {', '.join(unknown)}; NAME is one of {', '.join(QUICK + SLOW)}")
    found = []
    for name in names or QUICK + SLOW:
        print(name, file=sys.stderr, flush=True)
        found += check(name, update)
    print("\n".join(found) if found else f"docs/reproductions.md {'has' if update else 'agrees with'} what was printed")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
