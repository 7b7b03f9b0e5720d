"""JSON Lines: separators inside strings, places in errors, and files that end in half a line."""

import pytest

from jetflow.jsonl import cut_unfinished, read_jsonl


def rows(path, **options):
    return [row for _, row in read_jsonl(path, **options)]


def test_lines_end_at_line_breaks_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\u2028two\x85three"}\n\n{"text": 2}', encoding="utf-8")
    assert list(read_jsonl(path)) == [(f"{path}, line 1", {"text": "one\u2028two\x85three"}), (f"{path}, line 3", {"text": 2})]


def test_half_a_line_is_left_out_and_cut_off(tmp_path):
    path, whole = tmp_path / "a.jsonl", '{"a": "é"}\n'.encode()
    # The second one ends inside a character.
    for half in (b'{"a": ', b'{"a": "\xc3', b'{"a": 2}'):
        path.write_bytes(whole + half)
        assert rows(path, finished_only=True) == [{"a": "é"}]
        cut_unfinished(path)
        assert path.read_bytes() == whole
    cut_unfinished(path)
    assert path.read_bytes() == whole
    path.write_bytes(b'{"a"')
    assert rows(path, finished_only=True) == []
    cut_unfinished(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 2: is not JSON"), ("[1]", "line 2: must be a JSON object, got list")]
)
def test_what_is_no_object_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' + line)
    with pytest.raises(ValueError, match=message):
        rows(path)
