#!/usr/bin/env bash
# Lines covered by the tests, by folder: builds with -Db_coverage=true, runs the suites, asks gcov.
#   coverage.sh [--add] [SUITE...]     default: all suites; --add: adds to the counts of the run before
# A process that is killed writes no counts, so restarts count less than they run.
# kernels/cuda and generated files are left out. Exit status 1: a folder is below 80 %.
set -euo pipefail
cd "$(dirname "$0")/.."
adds=
[ "${1:-}" != --add ] || { adds=1; shift; }
bash deploy/install-deps.sh --test
build="${TANDEM_BUILD:-build}-coverage"
[ -d "$build" ] || meson setup "$build" -Dtests=enabled -Db_coverage=true -Dgpu=disabled >/dev/null
ninja -C "$build" >"$build/build.log" 2>&1 || { tail -40 "$build/build.log"; exit 1; }
[ -n "$adds" ] || find "$build" -name '*.gcda' -delete
suites=()
for s in "$@"; do suites+=(--suite "$s"); done
CK_TIMEOUT_MULTIPLIER=3 meson test -C "$build" --no-rebuild --num-processes 2 --timeout-multiplier 3 "${suites[@]}" \
  >"$build/coverage.log" 2>&1 || echo "# some tests failed: $build/coverage.log" >&2

python3 - "$build" <<'PY'
import collections, json, os, subprocess, sys
build = os.path.abspath(sys.argv[1])
root = os.getcwd()
lines = collections.defaultdict(set)  # file -> executable lines
hit = collections.defaultdict(set)
notes = [os.path.join(d, f) for d, _, files in os.walk(build) for f in files if f.endswith(".gcno")]
for note in notes:
    out = subprocess.run(["gcov", "--json-format", "--stdout", note], cwd=build, capture_output=True, text=True).stdout
    for text in filter(None, out.splitlines()):
        for f in json.loads(text)["files"]:
            name = os.path.relpath(os.path.normpath(os.path.join(build, f["file"])), root)
            outside = ("..", "tests/", "kernels/cuda/", os.path.relpath(build, root))
            if name.startswith(outside) or os.path.isabs(f["file"]):
                continue
            for line in f["lines"]:
                lines[name].add(line["line_number"])
                if line["count"]:
                    hit[name].add(line["line_number"])
folders = collections.defaultdict(lambda: [0, 0])
for name, all_lines in lines.items():
    folder = "/".join(name.split("/")[:2]) if name.startswith("proto/") else name.split("/")[0]
    folders[folder][0] += len(hit[name])
    folders[folder][1] += len(all_lines)
low = []
print(f"{'folder':<14}{'lines':>8}{'covered':>9}")
for folder, (n, total) in sorted(folders.items()):
    print(f"{folder:<14}{total:>8}{n / total:>9.1%}")
    if n / total < 0.8:
        low.append(folder)
worst = sorted(lines, key=lambda f: len(hit[f]) - len(lines[f]))[:20]
print("most lines not covered: " + ", ".join(f"{f} {len(lines[f]) - len(hit[f])}" for f in worst))
sys.exit(1 if low else 0)
PY
