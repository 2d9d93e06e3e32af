#!/usr/bin/env python3
"""Draws the processes of a cluster and the way of one request through them.

    cluster.py > docs/plots/cluster.svg

The drawing has a light ground of its own, so that it reads the same on a light and on a dark page.
"""
INK, FAINT, ROUTE, PAGES = "#1f2933", "#52606d", "#1d5fa8", "#b4530a"
WIDTH, HEIGHT = 860, 300


def text(x, y, words, size=13, color=INK, anchor="middle", weight="normal"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{words}</text>')


def box(x, y, width, height, name, lines, fill):
    out = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{INK}"/>',
           text(x + width / 2, y + 20, name, 14, weight="bold")]
    return "\n".join(out + [text(x + width / 2, y + 38 + 16 * i, line, 12, FAINT) for i, line in enumerate(lines)])


def arrow(path, color, both=False, width=2):
    name = "route" if color == ROUTE else "pages"
    start = f' marker-start="url(#{name})"' if both else ""
    return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"{start} marker-end="url(#{name})"/>'


def marker(name, color):
    return (f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="4.5" markerHeight="4.5" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{color}"/></marker>')


print("\n".join([
    f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
    "<title>One request in a tandem cluster</title>",
    f'<defs>{marker("route", ROUTE)}{marker("pages", PAGES)}</defs>',
    f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" stroke="#cbd2d9"/>',
    text(20, 55, "clients", anchor="start"), text(20, 73, "gRPC", 12, FAINT, "start"),
    arrow("M75 60H296", ROUTE, both=True), text(185, 50, "prompt, streamed answer", 12, ROUTE),
    box(300, 20, 260, 78, "tandem-router",
        ["text, prefix index, the one queue;", "places by cache and limits, or refuses"], "#e3effb"),
    box(40, 176, 220, 78, "tandem-prefill", ["computes the prompt's KV,", "samples the first token"], "#fff3e0"),
    box(320, 176, 220, 78, "tandem-decode", ["pulls the pages meanwhile,", "generates the other tokens"], "#fff3e0"),
    box(600, 176, 220, 78, "tandem-kvstore", ["keeps prefixes,", "DRAM over SSD (RocksDB)"], "#eaf5ea"),
    arrow("M340 98L180 172", ROUTE, both=True), arrow("M430 98V172", ROUTE, both=True),
    arrow("M520 98L680 172", ROUTE, both=True),
    text(224, 128, "legs, first token", 12, ROUTE, "end"), text(438, 146, "legs, tokens", 12, ROUTE, "start"),
    text(628, 128, "block events, load", 12, ROUTE, "start"),
    arrow("M264 215H316", PAGES, width=3), arrow("M596 215H544", PAGES, width=3),
    arrow("M150 258V274H710V258", PAGES, both=True),
    text(430, 291, "KV pages: leased, pulled layer by layer, checked by sums (mapped arena, TCP, UCX)", 12, PAGES),
    "</svg>"]))
