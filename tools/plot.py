"""A scatter plot with lines as an SVG file: a few series of labelled points over two axes.

Knows nothing of what is plotted. Writes plain SVG text, so that the project needs no plotting
package and the same figures give the same file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 72, 56
LABEL_ROWS = (14, -8, 25, -19, 36)  # where a point's label may stand: below it, above it, further
LABEL_SIZE = 10
COLOURS = ("#555555", "#c44e52", "#4c72b0", "#55a868", "#8172b2")


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Axis:
    title: str
    low: float
    high: float
    step: float

    def ticks(self) -> list[float]:
        count = round((self.high - self.low) / self.step)
        return [self.low + self.step * number for number in range(count + 1)]

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def svg(title: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    def across(value: float) -> float:
        return round(LEFT + x.share(value) * (WIDTH - LEFT - RIGHT), 1)

    def down(value: float) -> float:
        return round(HEIGHT - BOTTOM - y.share(value) * (HEIGHT - TOP - BOTTOM), 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, anchor="middle", size=14),
        _text(WIDTH / 2, HEIGHT - 14, x.title, anchor="middle"),
        f'<g transform="rotate(-90 16 {HEIGHT / 2})">'
        + _text(16, HEIGHT / 2, y.title, anchor="middle")
        + "</g>",
    ]
    for tick in x.ticks():
        lines.append(_line(across(tick), down(y.low), across(tick), down(y.high), "#e5e5e5"))
        lines.append(_text(across(tick), down(y.low) + 18, f"{tick:g}", anchor="middle"))
    for tick in y.ticks():
        lines.append(_line(across(x.low), down(tick), across(x.high), down(tick), "#e5e5e5"))
        lines.append(_text(across(x.low) - 8, down(tick) + 4, f"{tick:g}", anchor="end"))
    labels = Labels()
    for number, (one, colour) in enumerate(zip(series, COLOURS, strict=False)):
        places = [(across(point.x), down(point.y)) for point in one.points]
        path = " ".join(f"{left},{top}" for left, top in places)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" opacity="0.5"/>')
        for (left, top), point in zip(places, one.points, strict=True):
            lines.append(f'<circle cx="{left}" cy="{top}" r="3.5" fill="{colour}"/>')
            lines += labels.place(left, top, point.label, colour)
        row = down(y.low) - 18 * (len(series) - number)
        lines.append(f'<circle cx="{WIDTH - 190}" cy="{row}" r="3.5" fill="{colour}"/>')
        lines.append(_text(WIDTH - 180, row + 4, one.name))
    return "\n".join([*lines, "</svg>", ""])


class Labels:
    """Each label stands where none stands yet; where there is no room it is left out."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float, float]] = []  # left, right, baseline

    def place(self, x: float, y: float, label: str, colour: str) -> list[str]:
        half = 0.32 * LABEL_SIZE * len(label)
        for down in LABEL_ROWS:
            left, right, base = x - half, x + half, y + down
            if all(
                right < other_left or other_right < left
                for other_left, other_right, _ in self._near(base)
            ):
                self._taken.append((left, right, base))
                return [_text(x, base, label, anchor="middle", size=LABEL_SIZE, colour=colour)]
        return []

    def _near(self, base: float) -> list[tuple[float, float, float]]:
        return [box for box in self._taken if abs(box[2] - base) < LABEL_SIZE]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#333"
) -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}>{escape(text)}</text>"
