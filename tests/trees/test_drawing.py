import io

import pytest
import torch
from rich.console import Console

from jetflow import Acceptance, TokenTree
from jetflow.trees.drawing import draw_tree

SCORES = torch.tensor([[1.0, 0.5, 0.25, 0.125]]).log()
TREE = TokenTree.from_parents([[5, 7, 8, 9]], [[-1, 0, 0, 1]], SCORES)
ACCEPTANCE = Acceptance(torch.tensor([[0, 1]]), torch.tensor([1]), torch.tensor([4]))


def printed(drawing, color_system=None):
    console = Console(width=80, file=io.StringIO(), force_terminal=color_system is not None, color_system=color_system)
    console.print(drawing)
    return console.file.getvalue().splitlines()


def test_nodes_show_token_probabilities_and_marks_without_colour():
    lines = printed(draw_tree(TREE, decode=lambda token: f"t{token}", acceptance=ACCEPTANCE))
    assert lines[0] == "* 't5'"
    assert [line for line in lines if "* 't7'  0.500  path 0.500" in line]
    assert [line for line in lines if "  't8'  0.250  path 0.250" in line]
    assert [line for line in lines if "  't9'  0.250  path 0.125" in line]
    assert [line for line in lines if "+ 't4'" in line]
    assert len(lines) == 5
    assert not any("\x1b" in line for line in lines)


def test_the_accepted_path_is_coloured():
    lines = printed(draw_tree(TREE, acceptance=ACCEPTANCE), "standard")
    green = [line for line in lines if "\x1b[1;32m" in line]
    assert len(green) == 2
    assert all("* " in line for line in green)


def test_nothing_is_marked_without_an_acceptance_and_padding_is_left_out():
    tree = TokenTree.from_parents([[5, 7, 0], [5, 7, 8]], [[-1, 0, -1], [-1, 0, 1]], num_nodes=[2, 3])
    assert len(printed(draw_tree(tree))) == 2
    lines = printed(draw_tree(tree, 1))
    assert len(lines) == 3
    assert not any("*" in line or "+" in line for line in lines)


def test_decoded_text_is_not_read_as_markup():
    lines = printed(draw_tree(TREE, decode=lambda token: "[red]\n"))
    assert lines[0].strip() == r"'[red]\n'"


def test_rows_outside_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"row=1 must be in \[0, 1\)"):
        draw_tree(TREE, 1)
