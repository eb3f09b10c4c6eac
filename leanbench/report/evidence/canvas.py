"""Parts that all published pictures have: frame, title, axes' words. The SVG stands alone and is
readable on light and dark pages: its ground and ink follow `prefers-color-scheme`.
"""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 820, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 106, 52
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
#: Width of a character of a legend.
CHARACTER = 7.2
_FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
_STYLE = """<style>
.ground { fill: #ffffff } .ink { fill: #1b1e23 } .muted { fill: #5d646e }
.grid { stroke: #e8eaed } .limit { stroke: #5d646e }
@media (prefers-color-scheme: dark) {
.ground { fill: #15181d } .ink { fill: #e9ecf0 } .muted { fill: #a2a9b4 }
.grid { stroke: #2c3138 } .limit { stroke: #a2a9b4 }
}
</style>"""


def picture(title: str, below: str, x: str, y: str, parts: list[str]) -> str:
    """The whole file.

    Args:
        below: what stands under the title.
        x: the name of the x axis, with its unit.
        y: the name of the y axis, with its unit.
        parts: elements of the plot.
    """
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
                f' viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="{_FONT}" font-size="13">'
            ),
            f"<title>{escape(title)}</title>",
            _STYLE,
            f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
            text(LEFT, 26, title, size=16),
            text(LEFT, 45, below, style="muted"),
            text(12, TOP - 12, y, style="muted"),
            text(LEFT + PLOT_WIDTH / 2, HEIGHT - 10, x, style="muted", anchor="middle"),
            *parts,
            "</svg>\n",
        ]
    )


def level(y: float, words: str, style: str = "grid") -> list[str]:
    """A horizontal line with its value on the left."""
    return [
        f'<line class="{style}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        text(LEFT - 8, y + 4, words, style="muted", anchor="end"),
    ]


def place(x: float, words: str) -> str:
    """A value below the x axis."""
    return text(x, HEIGHT - 30, words, anchor="middle")


def text(
    x: float, y: float, words: str, *, size: int = 13, style: str = "ink", anchor: str = "start"
) -> str:
    return (
        f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" font-size="{size}"'
        f' text-anchor="{anchor}">{escape(words)}</text>'
    )
