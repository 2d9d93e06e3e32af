"""The tables of docs/reproductions.md are those that the scripts of deploy/reproduce print
(deploy/reproduce/tables.py has the tolerances).

Default: tables that take seconds. TANDEM_LONG=reproductions: all of them, half an hour on one core. No
cluster runs here.
"""
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
from harness import *
sys.path.insert(0, os.path.join(SOURCE, "deploy/reproduce"))
import tables

TRACES = {"TRACE": os.path.join(SHARED, "traces/mooncake_conversation.jsonl"), "AZURE": os.path.join(SHARED, "traces/azure_2023_conv.csv")}
LONG = os.environ.get("TANDEM_LONG") in ("reproductions", "all")


def add(name):
    def check():
        for variable, default in TRACES.items():
            path = os.environ.setdefault(variable, default)
            if not os.access(path, os.R_OK):
                raise Skip(f"{path} is not there")
        if os.environ.get("TANDEM_SANITIZE"):
            raise Skip("a sanitizer makes it ten times as long, and test_simulate runs the same code")
        if name in tables.SLOW and not LONG:
            raise Skip("it takes minutes: tests/run.sh --long reproductions")
        os.environ["TANDEM"] = TANDEM
        different = tables.check(name)
        assert not different, "\n".join(different)
    check.__name__ = f"test_the_document_has_what_{name}_prints"
    test(check)


@test
def test_a_stale_figure_is_named():
    columns = "| policy | mean TTFT | over global |"
    now = ["| random | 20.2 s | 12.0 |", "| tandem | 1.61 s | 0.994 |"]
    assert not tables.differences("fig5", columns, ["| random | 20.3 s | 12.1 |", "| tandem | 1.61 s | 0.995 |"], now)
    assert tables.differences("fig5", columns, ["| random | 20.2 s | 12.0 |", "| tandem | 1.61 s | 0.96 |"], now) == \
        ["fig5: over global: the document says 0.96, but it is 0.994, in the row | tandem | 1.61 s | 0.994 |"]
    assert len(tables.differences("fig5", columns, ["| random | 20.2 ms | 12.0 |", "| tandem | 1.61 s | +0.994 s |"], now)) == 2
    assert len(tables.differences("fig5", columns, now[:1], now)) == 1
    assert tables.is_same("2,391 of 5, -0.1 %", "2,400 of 5, -0.2 %") and not tables.is_same("7 in 1", "8 in 1")


for name in tables.QUICK + tables.SLOW:
    add(name)
main()
