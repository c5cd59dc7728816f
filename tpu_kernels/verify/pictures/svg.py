"""Drawing by hand: the few shapes that the charts need, as SVG that follows the page's colours.

Colours are classes, never values, so that one drawing serves a light and a dark page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence


class Drawing:
    """An SVG picture with a title and a description for those who do not see it.

    Args:
        width: In user units; about pixels.
        height: The same.
        title: What it is.
        description: What it shows, in a sentence or two.
    """

    def __init__(self, width: float, height: float, title: str, description: str) -> None:
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str = ""
    ) -> None:
        """Draw a box; a title shows when the mouse rests on it."""
        self._shape(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
            f'class="{kind}"',
            "rect",
            title,
        )

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        """Draw a disc."""
        self._shape(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{kind}"', "circle", title
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text, escaped."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )

    def __str__(self) -> str:
        title, description = html.escape(self._title), html.escape(self._description)
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{title}. {description}" '
            f'style="--width:{self.width:.0f}px">{"".join(self._parts)}</svg>'
        )

    def _shape(self, start: str, tag: str, title: str) -> None:
        inner = f"<title>{html.escape(title)}</title></{tag}>" if title else f"</{tag}>"
        self._parts.append(f"{start}>{inner}")


class LogScale:
    """Maps positive values to positions by their logarithm.

    Args:
        low: Value at `start`.
        high: Value at `end`.
        start: Position.
        end: Position.

    Attributes:
        limits: Lowest and highest value.
    """

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.limits = (low, high)
        self._low, self._span = math.log10(low), math.log10(high / low)
        self._start, self._length = start, end - start

    def __call__(self, value: float) -> float:
        """The position of a value, kept within the scale."""
        share = (math.log10(value) - self._low) / self._span
        return self._start + self._length * min(max(share, 0.0), 1.0)

    def decades(self) -> list[int]:
        """Exponents of the powers of ten on the scale."""
        first, last = math.ceil(self._low - 1e-9), math.floor(self._low + self._span + 1e-9)
        return list(range(first, last + 1))


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two limits.

    Args:
        low: The lower one.
        high: The upper one.
        most: How many at most.

    Returns:
        Multiples of 1, 2 or 5 times a power of ten.

    Example:
        >>> round_ticks(0.0, 23.0), round_ticks(735.2, 755.9, 4)
        ([0.0, 5.0, 10.0, 15.0, 20.0], [740.0, 750.0])
    """
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(f * power for f in (1, 2, 5, 10, 20) if (high - low) / (f * power) < most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(step * index, 9) for index in range(first, last + 1)]


def si(value: float, unit: str) -> str:
    """Write a value with a prefix.

    Example:
        >>> si(9.2e14, "op/s"), si(1.64e12, "B/s"), si(0, "B/s")
        ('920 Top/s', '1.64 TB/s', '0 B/s')
    """
    if value == 0:
        return f"0 {unit}"
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
