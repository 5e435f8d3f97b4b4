"""Maps as SVG: which shade a cell has, where it stands, and what is read aloud."""

import re
from xml.etree import ElementTree

from laconic.evaluation.report import grids

VALUES = [[0.0, 0.5, 1.0], [2.0, -1.0, 0.25]]


def test_every_cell_has_the_shade_of_its_value() -> None:
    """One path a shade, without the lightest; a cell is a stroke at its column and row, and bounds are not passed."""
    drawn = grids.plot_heat_map(VALUES, ["a", "b"], ["x", "y", "z"], (0.0, 1.0), "a map")
    root = ElementTree.fromstring(drawn)
    (cells,) = root.iter("g")
    found = {
        tuple(map(int, at)): float(path.attrib["stroke-opacity"])
        for path in cells
        for at in re.findall(r"M(\d+) (\d+)h", path.attrib["d"])
    }
    assert found == {(1, 0): 0.5, (2, 0): 1.0, (0, 1): 1.0, (2, 1): 0.25}
    left, middle, scale = map(float, re.findall(r"[\d.]+", cells.attrib["transform"]))
    assert scale == grids.CELL_PIXELS
    assert left + 3 * scale <= float(root.attrib["width"])
    assert middle + 1.5 * scale <= float(root.attrib["height"])


def test_labels_and_text_are_escaped_and_spaces_seen() -> None:
    drawn = grids.plot_heat_map([[1.0, 0.0]], ['"1"'], ["<<", " 7\n"], (0.0, 1.0), 'likest: "<<"', mark_max=True)
    root = ElementTree.fromstring(drawn)
    assert [text.text for text in root.iter("text")] == ['"1"', "<<", "␣7⏎"]
    assert root.attrib["aria-label"] == 'likest: "<<"'
    (dot,), (cells,) = root.iter("circle"), root.iter("g")
    left = float(re.findall(r"[\d.]+", cells.attrib["transform"])[0])
    assert abs(float(dot.attrib["cx"]) - left - grids.CELL_PIXELS / 2) <= 1  # in the first column
    assert grids.show_whitespace("") == "␣"


def test_bounds_are_of_all_maps_together() -> None:
    assert grids.find_value_range([VALUES, [[3.0]]]) == (-1.0, 3.0)
    assert grids.find_value_range([]) == (0.0, 1.0)
    flat = ElementTree.fromstring(grids.plot_heat_map([[0.5]], ["1"], ["x"], (0.5, 0.5), "flat"))
    assert not list(flat.iter("path"))
