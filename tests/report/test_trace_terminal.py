"""Characters of timelines with known cells."""

import io

import pytest
from rich.console import Console
from trace_examples import cta, fixed_split, lean, tiles, timeline

from leanbench.core.timeline import Timeline
from leanbench.report.trace.picture import TILE_COLORS, Panel
from leanbench.report.trace.terminal import terminal_text

#: 40 columns of picture.
WIDTH = 49


def lines(*timelines: Timeline, width: int = WIDTH, ascii_only: bool = False) -> list[str]:
    return terminal_text(
        [Panel(timeline) for timeline in timelines], width, ascii_only
    ).plain.splitlines()


def picture(*timelines: Timeline, **options: bool) -> list[str]:
    return [line for line in lines(*timelines, **options) if line[8:9] in ("│", "|")]


def test_each_cell_shows_what_took_most_of_it() -> None:
    assert picture(lean()) == [
        "      0 │" + "█" * 20 + " " * 20,
        "      1 │" + "█" * 20 + "-" * 10 + "#" * 10,
        "      2 │" + "█" * 30 + " " * 10,
        "      3 │" + " " * 40,
    ]


def test_a_terminal_without_unicode() -> None:
    text = terminal_text([Panel(lean(kernel="lëan"))], WIDTH, ascii_only=True)
    assert text.plain.isascii()
    assert "latency 41.0 us" in text.plain
    assert picture(lean(), ascii_only=True)[1] == "      1 |" + "O" * 20 + "-" * 10 + "#" * 10


def test_fill_is_the_share_of_sms_that_work() -> None:
    """48 SMs, two to a row of 24: row r has a CTA on none, one or both of them."""
    ctas = [cta(0, 0, tiles(0, 0, 40)), cta(1, 1, tiles(0, 0, 40)), cta(2, 2, tiles(0, 0, 20))]
    rows = picture(timeline(*ctas, sms=48))
    assert len(rows) == 24
    assert rows[0] == "    0-1 │" + "█" * 40
    assert rows[1] == "    2-3 │" + "▒" * 20 + " " * 20
    assert rows[23] == "  46-47 │" + " " * 40


@pytest.mark.parametrize(
    ("sms", "panels", "rows"), [(132, 1, 22), (132, 3, 15), (16, 3, 16), (17, 3, 9), (1, 1, 1)]
)
def test_many_sms_share_rows(sms: int, panels: int, rows: int) -> None:
    assert len(picture(*[timeline(cta(0, 0, tiles(0, 0, 1)), sms=sms)] * panels)) == rows * panels


def test_all_panels_share_one_time_scale() -> None:
    rows = picture(lean(), fixed_split())
    assert rows[4] == "      0 │" + "█" * 10 + "  " + "#" * 4 + " " * 24
    assert rows[7] == "      3 │" + "█" * 10 + " " * 30


def test_the_axis_names_round_times() -> None:
    axis = lines(lean(), width=89)
    at = next(index for index, line in enumerate(axis) if "└" in line)
    assert axis[at][8:] == "└" + ("┴" + "─" * 19) * 3 + "┴" + "─" * 18 + "┴"
    assert axis[at + 1].split() == ["0", "µs", "10", "20", "30", "40"]
    # 10 us of 40 on 80 columns: the label's middle is under the mark.
    assert axis[at + 1].index("10") + 1 == axis[at].index("┴", 10)


def test_colour_is_the_output_tiles_and_grey_where_there_are_many() -> None:
    text = terminal_text([Panel(lean())], WIDTH)
    start = text.plain.index("      1 │") + 9
    styles = {
        offset: str(span.style) for span in text.spans for offset in range(span.start, span.end)
    }
    zero, one = TILE_COLORS[:2]
    assert [styles[start + column] for column in (0, 9, 10, 19)] == [zero, zero, one, one]
    many = timeline(*(cta(n, n, tiles(n, 0, 1)) for n in range(48)), sms=480)
    text = terminal_text([Panel(many)], WIDTH)
    style = text.get_style_at_offset(Console(), text.plain.index("█"))
    assert style.color is not None
    assert style.color.name == "#808690"


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (40, 60, 80, 200):
        text = terminal_text([Panel(lean(), 0.9), Panel(fixed_split())], width)
        output = io.StringIO()
        Console(file=output, width=width).print(text)
        assert max(map(len, output.getvalue().splitlines())) <= width
        assert output.getvalue().split() == text.plain.split()


def test_an_empty_timeline_is_drawn_empty() -> None:
    assert picture(timeline()) == [f"      {row} │" + " " * 40 for row in range(4)]
