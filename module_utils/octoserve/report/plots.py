"""The report's plots as inline SVG: colours are the page's CSS variables, texts are texts, ids are the plot's own."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree

from . import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
URL = re.compile(r"url\(#([\w.-]+)\)")
#: Inches; one plot fills a phone's width, two stand side by side on a desk. Text is then about as large as the page's.
SIZE = (4.5, 3.25)
#: What matplotlib draws in, and what the page calls it (templates/report.html.j2).
COLOURS = {
    "#000001": "var(--text)",
    "#000002": "var(--soft)",
    "#000003": "var(--line)",
    "#000004": "var(--plot-1)",
    "#000005": "var(--plot-2)",
    "#000006": "var(--bad)",
    "#000007": "var(--card)",
}
TEXT, SOFT, LINE, FIRST, SECOND, ALARM, CARD = COLOURS
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "octoserve",  # ids are the same in every run
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": TEXT,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelsize": 10.5,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "ytick.major.size": 0,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.labelcolor": TEXT,
}


@dataclass(frozen=True)
class Plot:
    """One plot: inline SVG, empty where it could not be drawn, and its numbers as a table."""

    name: str
    title: str
    description: str
    svg: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class _Picture:
    """What is drawn, before it is drawn."""

    name: str
    title: str
    description: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    draw: Callable[[Figure], None]


def plots(result: Mapping[str, Any]) -> tuple[list[Plot], str]:
    """The plots of a throughput result, and why they are not drawn where they are not (their tables are there)."""
    makers = (_concurrency, _context, _latency, _history)
    pictures = [picture for make in makers if (picture := make(result)) is not None]
    if not pictures:
        return [], ""
    try:
        svgs, reason = [_svg(picture) for picture in pictures], ""
    except ImportError as error:
        svgs = ["" for _ in pictures]
        reason = f"No plots: {error}. Install requirements/controller.txt where Ansible runs."
    return [
        Plot(picture.name, picture.title, picture.description, svg, picture.head, picture.rows)
        for picture, svg in zip(pictures, svgs)
    ], reason


def _measured(result: Mapping[str, Any], sweep: str, key: str) -> list[Mapping[str, Any]]:
    points = [point for point in result.get("points") or [] if point["sweep"] == sweep and point["requests"]]
    return sorted((point for point in points if point["output_tok_s"] is not None), key=lambda point: float(point[key]))


def _concurrency(result: Mapping[str, Any]) -> _Picture | None:
    points = _measured(result, "concurrency", "concurrency")
    if len(points) < 2:
        return None
    streams = [point["concurrency"] for point in points]
    together = [point["output_tok_s"] for point in points]
    each = [point["decode_tok_s"] for point in points]

    def draw(figure: Figure) -> None:
        # Two axes: on one the rate of each request would lie on the floor.
        upper, lower = figure.subplots(2, sharex=True, height_ratios=[3, 2])
        _line(upper, together, FIRST)
        upper.set_ylabel("all together, tok/s")
        _room(upper, together)
        if None not in each:
            _line(lower, each, SECOND)
            _room(lower, each)
        lower.set_ylabel("each, tok/s")
        lower.set_xticks(range(len(points)), [str(count) for count in streams])
        lower.set_xlabel("requests at the same time")
        figure.align_ylabels()

    rows = [
        (
            str(point["concurrency"]),
            words.number(point["output_tok_s"]),
            words.number(point["decode_tok_s"]),
            words.number((point["ttft_ms"] or {}).get("p50"), 0),
            words.number((point["itl_ms"] or {}).get("p50")),
            words.number((point["itl_ms"] or {}).get("p99")),
            words.answered(point),
        )
        for point in points
    ]
    text = (
        f"From {words.number(together[0], 0)} tokens per second at {streams[0]} to {words.number(together[-1], 0)} "
        f"at {streams[-1]} requests at the same time."
    )
    head = ("requests", "tok/s in all", "tok/s each", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms", "answered")
    return _Picture("concurrency", "Throughput over concurrency", text, head, rows, draw)


def _context(result: Mapping[str, Any]) -> _Picture | None:
    points = _measured(result, "context", "context_tokens")
    if len(points) < 2:
        return None
    lengths = [words.tokens(point["context_tokens"]) for point in points]
    each = [point["decode_tok_s"] for point in points]
    whole = [point["end_to_end_tok_s"] for point in points]
    if None in each:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _line(axes, each, FIRST, label="decode")
        if None not in whole:
            _line(axes, whole, SECOND, label="end to end", below=True)
        axes.set_xticks(range(len(points)), lengths)
        axes.set_xlabel("tokens in the prompt")
        axes.set_ylabel("each request, tok/s")
        _room(axes, each, whole)
        _legend(axes)

    rows = [
        (
            name,
            words.number(point["prompt_tokens"], 0),
            words.number(point["decode_tok_s"]),
            words.number(point["end_to_end_tok_s"]),
            words.number((point["ttft_ms"] or {}).get("p50"), 0),
            words.number((point["itl_ms"] or {}).get("p99")),
        )
        for name, point in zip(lengths, points)
    ]
    text = (
        f"A request decodes {words.number(each[0])} tokens per second after a {lengths[0]} prompt and "
        f"{words.number(each[-1])} after one of {lengths[-1]}."
    )
    head = ("prompt", "prompt tokens", "decode tok/s", "end to end tok/s", "TTFT p50 ms", "ITL p99 ms")
    return _Picture("context", "Throughput over context", text, head, rows, draw)


def _latency(result: Mapping[str, Any]) -> _Picture | None:
    gaps = result.get("itl_ms") or {}
    bars = [(float(edge), int(count)) for edge, count in gaps.get("histogram") or []]
    total = sum(count for _, count in bars)
    if not total:
        return None
    edges = [edge for edge, _ in bars]
    # The buckets grow by a factor; the first begins where one more below it would end.
    lower = [edges[0] * edges[0] / edges[1] if len(edges) > 1 else edges[0] / 1.1, *edges[:-1]]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        widths = [0.9 * (high - low) for low, high in zip(lower, edges)]
        axes.bar(lower, [100 * count / total for _, count in bars], widths, color=FIRST, align="edge")
        axes.set_xscale("log")
        axes.set_xlim(lower[0], edges[-1])
        top = 1.3 * axes.get_ylim()[1]
        axes.set_ylim(0, top)
        for name, raised in (("p50", 0.84), ("p95", 0.92), ("p99", 1.0)):
            if (value := gaps.get(name)) is None:
                continue
            axes.vlines(value, 0, top * raised, color=SECOND, linewidth=1.2, linestyle=(0, (3, 2)))
            share = math.log(value / lower[0]) / math.log(edges[-1] / lower[0])
            side = _Side(-4, 0, "right", "top") if share > 0.3 else _Side(4, 0, "left", "top")
            _note(axes, f"{name} {words.number(value, 0 if value >= 100 else 1)}", (value, top * raised), side, TEXT)
        shown = _ticks(lower[0], edges[-1])
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("milliseconds between two tokens")
        axes.set_ylabel("share, %")

    rows = [(words.number(bar[0], 2), str(bar[1]), f"{100 * bar[1] / total:.1f}") for bar in bars]
    text = (
        f"Half of the {total} gaps are below {words.number(gaps.get('p50'))} ms, 95 % below "
        f"{words.number(gaps.get('p95'))}, 99 % below {words.number(gaps.get('p99'))}; "
        f"the longest lasted {words.number(gaps.get('max'))} ms."
    )
    return _Picture("latency", "Inter-token latency, one request", text, ("up to ms", "gaps", "%"), rows, draw)


def _history(result: Mapping[str, Any]) -> _Picture | None:
    baseline, now = result.get("baseline") or {}, compared(result)
    earlier = earlier_starts(result)
    if not earlier or now is None:
        return None
    alarm = baseline.get("alarm_below")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        here = len(earlier) + 1
        means = [entry["mean"] for entry in earlier]
        axes.plot(range(1, here), means, color=FIRST, marker="o", label="earlier starts")
        slow = [n for n, entry in enumerate(earlier, 1) if entry.get("regression")]
        if slow:
            (found,) = axes.plot(slow, [means[n - 1] for n in slow], color=ALARM, marker="o", linestyle="none")
            found.set(markerfacecolor=CARD, markersize=7, label="regressions")
        axes.plot([here - 1, here], [means[-1], now], color=LINE, linewidth=1.5, zorder=1)
        axes.plot([here], [now], color=SECOND, marker="D", linestyle="none", markersize=8, label="this start")
        values = [*means, now]
        if alarm is not None:
            values.append(alarm)
            axes.axhline(alarm, color=ALARM, linewidth=1.4, linestyle=(0, (5, 3)))
            _note(axes, f"alarm below {words.number(alarm)}", (0.5, alarm), _Side(4, -3, "left", "top"), ALARM)
        space = max(max(values) - min(values), 0.02 * max(values))
        axes.set_ylim(min(values) - 0.3 * space, max(values) + 0.45 * space)
        every = max(1, -(-here // 8))
        shown = [n for n in range(1, here + 1) if (here - n) % every == 0]
        axes.set_xticks(shown, ["now" if n == here else str(n) for n in shown])
        axes.set_xlim(0.5, here + 0.5)
        axes.set_xlabel("start of the service on this host")
        axes.set_ylabel("decode, tok/s")
        _legend(axes)

    rows = [
        (
            str(n),
            str(entry["time"]),
            str(entry["deployment"] or words.NONE),
            words.number(entry["mean"], 2),
            str(entry["trials"]),
            "regression" if entry.get("regression") else "",
        )
        for n, entry in enumerate(earlier, 1)
    ]
    rows.append(("now", "", "", words.number(now, 2), str(len(result.get("trials") or [])), ""))
    text = f"{words.plural(len(earlier), 'earlier start')}; this one decodes {words.number(now, 2)} tokens per second. "
    text += "The alarm needs three earlier starts." if alarm is None else f"The alarm is at {words.number(alarm, 2)}."
    head = ("start", "time", "deployment", "decode tok/s", "trials", "")
    return _Picture("history", "Decode rate, start by start", text, head, rows, draw)


def compared(result: Mapping[str, Any]) -> float | None:
    """The rate that the baseline judges a start by: the steady one where the gate tells it, else the mean."""
    found = result.get("steady_tok_s") or result.get("decode_tok_s") or {}
    return found.get("mean")


def earlier_starts(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The baseline's history without this start, which is its newest entry where it was kept."""
    baseline = result.get("baseline") or {}
    history = list(baseline.get("history") or [])
    healthy = [entry for entry in history if not entry.get("regression")]
    if result.get("kept") or len(healthy) > baseline.get("starts", 0):
        return history[:-1]
    return history


def _line(axes: Axes, values: Sequence[float], colour: str, *, label: str = "", below: bool = False) -> None:
    """A line over 0, 1, 2, … with its numbers above or below its points."""
    axes.plot(range(len(values)), values, color=colour, marker="o", label=label)
    for place, value in enumerate(values):
        text = words.number(value, 0 if value >= 100 else 1)
        side = _Side(0, -7, "center", "top") if below else _Side(0, 7, "center", "bottom")
        _note(axes, text, (place, value), side, colour)


@dataclass(frozen=True)
class _Side:
    """Where a text stands beside a point: how far (typographic points), and which of its own sides is there."""

    right: float
    up: float
    horizontal: Literal["left", "center", "right"]
    vertical: Literal["top", "bottom"]


def _note(axes: Axes, text: str, at: tuple[float, float], side: _Side, colour: str) -> None:
    """A text beside a point."""
    axes.annotate(
        text,
        at,
        xytext=(side.right, side.up),
        textcoords="offset points",
        ha=side.horizontal,
        va=side.vertical,
        fontsize=9.5,
        color=colour,
    )


def _legend(axes: Axes) -> None:
    axes.legend(loc="upper left", ncols=3, columnspacing=1.2, handletextpad=0.5, borderaxespad=0)


def _room(axes: Axes, *series: Sequence[float | None]) -> None:
    """From zero, with room for numbers and a legend above the highest point."""
    top = max(value for values in series for value in values if value is not None)
    axes.set_ylim(0, 1.35 * top)
    axes.locator_params(axis="y", nbins=5)
    axes.margins(x=0.08)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between two ends of a logarithmic axis."""
    from matplotlib.ticker import MaxNLocator

    if high < 10 * low:
        return [float(tick) for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high]
    decades = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    steps = (1,) if high > 1000 * low else (1, 3)
    return [step * decade for decade in decades for step in steps if low <= step * decade <= high]


def _svg(picture: _Picture) -> str:
    from matplotlib import style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # The library's own defaults below ours: a reader's matplotlibrc has no say.
    with style.context(["default", STYLE]):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(figure)
        picture.draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return inline(out.getvalue(), picture.name, picture.title, picture.description)


def inline(document: str, name: str, title: str, description: str) -> str:
    """An SVG document as an element of a page: named for readers, and nothing in it reaches beyond it."""
    ElementTree.register_namespace("", SVG)
    root = ElementTree.fromstring(document)  # noqa: S314  # drawn here a moment ago
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # matplotlib's style would hold for the whole page
                parent.remove(child)
    _own_ids(root, name)
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-desc")
    for position, (tag, said) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{name}-{tag}")
        element.text = said
        root.insert(position, element)
    text = ElementTree.tostring(root, encoding="unicode")
    for drawn, called in COLOURS.items():
        text = text.replace(drawn, called)
    # The page's own font, whatever matplotlib measured with.
    return re.sub(r"font: ([^;\"]*?)'[^;\"]*sans-serif", r"font: \1var(--font)", text)


def _own_ids(root: ElementTree.Element, name: str) -> None:
    """Give ids that something refers to the plot's name, and drop the others: several plots stand in one page."""
    link = f"{{{XLINK}}}href"
    used = {value.removeprefix("#") for element in root.iter() if (value := element.get(link))}
    used |= {one for element in root.iter() for value in element.attrib.values() for one in URL.findall(value)}
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "id" and value not in used:
                del element.attrib[key]
            elif key == "id":
                element.set(key, f"{name}-{value}")
            elif key == link:
                del element.attrib[key]
                element.set("href", f"#{name}-{value.removeprefix('#')}")
            else:
                element.set(key, URL.sub(rf"url(#{name}-\1)", value))
