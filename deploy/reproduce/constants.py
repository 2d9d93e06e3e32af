#!/usr/bin/env python3
"""What each constant of sched/ is worth: goodput with half and with double of it (docs/scheduling.md, "Every
constant").

    constants.py [--requests 1500] [NAME ...]

For each NAME (default: all that the document's table has, and a file of sched/ defines as one number) the
scheduler is built anew with the constant halved, then doubled, linked with the objects of build/, and run on
the beds and rates of BEDS below (as in goodput.py, lengths not known, two seeds). Prints the change of the
sum of goodput in per cent, the change of the worst bed at one rate if that is 3 % or more, and the least
share of the admitted that met their limits. Other seeds alone change the sum by up to half a per cent.

Twenty seconds for each of the two on one core. TANDEM is not used: the binary is build/cli/tandem with
another libsched.
"""
import argparse, concurrent.futures, json, os, re, shlex, subprocess, sys, tempfile

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import goodput

BUILD = os.path.join(goodput.ROOT, "build")
SCHED = os.path.join(goodput.ROOT, "sched")
BEDS = {"8b-4+4-30": (9, 18), "70b-4+4-200": (5, 10), "answers-4+4": (60,), "node-8+1-100": (5,)}
NUMBER = r"[0-9][0-9.]*(?:e[+-]?[0-9]+)?"


def definition(name):
    """(file, text before the number, number)"""
    pattern = re.compile(rf"(\b{name} = |#define {name}\s+)({NUMBER})(?= *(?:[,;}}/\n]))")
    for file in sorted(os.listdir(SCHED)):
        with open(os.path.join(SCHED, file), encoding="utf-8") as f:
            match = pattern.search(f.read())
        if match:
            return file, match.group(1), match.group(2)
    return None


def documented():
    with open(os.path.join(goodput.ROOT, "docs/scheduling.md"), encoding="utf-8") as f:
        rows = [line for line in f.read().partition("## Every constant")[2].splitlines() if line.startswith("| `")]
    names = [n for row in rows for n in re.findall(r"`([A-Z][A-Z_0-9]+)`", row.split("|")[1])]
    return [n for n in names if definition(n)]


def scaled(number, factor):
    is_whole, x = re.fullmatch("[0-9]+", number), float(number)
    if 0.5 < x < 1:  # a share of which the rest matters
        return repr(1 - (1 - x) * factor)
    return str(max(1, round(int(number) * factor))) if is_whole else repr(float(number) * factor)


def commands():
    with open(os.path.join(BUILD, "compile_commands.json"), encoding="utf-8") as f:
        compiles = [c for c in json.load(f) if "/libsched.a.p/" in c["command"]
                    or "libsched.a.p/" in c.get("output", "")]
    link = subprocess.run(["ninja", "-C", BUILD, "-t", "commands", "cli/tandem"], stdout=subprocess.PIPE, text=True,
                          check=True)
    return compiles, [line for line in link.stdout.splitlines() if " -o cli/tandem " in line][-1]


def build(directory, change):
    """A tandem in which the definition (file, before, number) has another number; None: as it is."""
    tree = os.path.join(directory, "tree")
    subprocess.run(["rm", "-rf", tree], check=True)
    os.makedirs(tree)
    subprocess.run(["cp", "-r", SCHED, tree], check=True)
    if change:
        (file, before, number), value = change
        path = os.path.join(tree, "sched", file)
        with open(path, encoding="utf-8") as f:
            text = f.read()
        with open(path, "w", encoding="utf-8") as f:
            f.write(text.replace(before + number, before + value, 1))
    compiles, link = commands()
    objects = []
    def compile_one(c):
        args = shlex.split(c["command"])
        source = os.path.join(tree, "sched", os.path.basename(c["file"]))
        out = source[:-2] + ".o"
        args[args.index("-o") + 1] = out
        args[args.index("-c") + 1] = source
        at = args.index("-c")
        subprocess.run(args[:1] + ["-I" + tree] + args[1:at] + args[at:], cwd=BUILD, check=True,
                       stderr=subprocess.DEVNULL)
        return out
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, compiles))
    archive, binary = os.path.join(directory, "libsched.a"), os.path.join(directory, "tandem")
    subprocess.run(["rm", "-f", archive], check=True)
    subprocess.run(["ar", "rcs", archive, *objects], check=True)
    subprocess.run(link.replace("sched/libsched.a", archive).replace("-o cli/tandem ", f"-o {binary} "), shell=True,
                   cwd=BUILD, check=True)
    return binary


def measure(runner, binary):
    """{(bed, rate): (goodput, share of the admitted)}"""
    goodput.TANDEM, all_beds = binary, goodput.beds()
    tasks = {(name, rate): runner.pool.submit(runner.simulate, all_beds[name], "tandem", "unknown", rate, 2)
             for name, rates in BEDS.items() for rate in rates}
    return {key: (point["goodput"], point["admitted"])
            for key, point in ((k, goodput.summary(t.result())) for k, t in tasks.items())}


def compare(now, base):
    total = sum(g for g, _ in now.values()) / sum(g for g, _ in base.values()) - 1
    each = [now[k][0] / base[k][0] - 1 for k in base]
    worst = max(each, key=abs)
    text = f"{100 * total:+.1f}" + (f" (worst {100 * worst:+.1f})" if abs(worst) >= 0.03 else "")
    return text, min(a for _, a in now.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--requests", type=int, default=1500, help="of each trace, the first so many [1500]")
    args = parser.parse_args()
    names = args.names or documented()
    missing = [n for n in names if not definition(n)]
    if missing:
        parser.error(f"no file of sched/ defines {', '.join(missing)} as a number")
    if not os.access(goodput.TRACE, os.R_OK):
        print(f"constants.py: {goodput.TRACE} is not there", file=sys.stderr)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        runner = goodput.Runner(directory, args.requests)
        goodput.TANDEM = os.path.join(BUILD, "cli/tandem")
        for name in {b.trace for n, b in goodput.beds().items() if n in BEDS}:
            runner.trace(name)
        base = measure(runner, build(directory, None))
        print(f"as it is: {sum(g for g, _ in base.values()):.2f}/s in all, "
              f"{100 * min(a for _, a in base.values()):.1f} % of the admitted",
              flush=True)
        print(f"{'constant':22}{'value':>10}  {'half':24}{'double':24}{'least of the admitted':>22}", flush=True)
        for name in names:
            where = definition(name)
            half, a = compare(measure(runner, build(directory, (where, scaled(where[2], 0.5)))), base)
            double, b = compare(measure(runner, build(directory, (where, scaled(where[2], 2)))), base)
            print(f"{name:22}{where[2]:>10}  {half:24}{double:24}{100 * min(a, b):20.1f} %", flush=True)


if __name__ == "__main__":
    main()
