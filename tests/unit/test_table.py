"""Tables of captions against Python's own writer; faults that would damage a caption are refused by line."""

import csv
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.data.sources import own
from distill.data.videos.table import read_captions, read_table
from distill.data.videos.video_folder import read_metadata
from tests.unit.refused import refusal, refused

QUICK = settings(max_examples=30, deadline=None, derandomize=True)


def refused_table(path, content: str | bytes, columns=("file_name", "caption")) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    message = refusal(read_table, path, columns, f"data.path: {path}")
    assert message.startswith(f"data.path: {path}")
    return message.removeprefix(f"data.path: {path}")


PRINTABLE = st.characters(exclude_categories=("Cs", "Cc"))
CAPTION = st.text(st.one_of(PRINTABLE, st.sampled_from(',;"\n\t|')), max_size=40)


@QUICK
@given(captions=st.lists(CAPTION, min_size=1, max_size=6), ends=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_what_a_spreadsheet_writes_comes_back_with_its_lines(tmp_path_factory, captions, ends, mark):
    """Any caption survives, with quotes, commas and line breaks. The line numbers are the file's."""
    path = tmp_path_factory.mktemp("table") / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig" if mark else "utf-8") as file:
        writer = csv.writer(file, lineterminator=ends, quoting=csv.QUOTE_ALL)
        writer.writerows([("caption", "file_name"), *((text, f"clip_{i}.mp4") for i, text in enumerate(captions))])
    rows = read_table(path, ("file_name", "caption"), "data.path")
    assert [values for _, values in rows] == [(f"clip_{i}.mp4", text) for i, text in enumerate(captions)]
    line = 2
    for (found, _), text in zip(rows, captions, strict=True):
        assert found == line
        line += 1 + text.count("\n")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a.mp4,a bird\nb.mp4,a bird, flying\n", "line 3"),
        ('a.mp4,"a bird\nb.mp4,a cat\nc.mp4,a dog\n', "line 2"),
        ('x.mp4,"one\ntwo"\na.mp4,"a bird\nb.mp4,"a cat"\n', "line 4"),
        ('a.mp4,"a bird\nb.mp4,a cat\nc.mp4,a dog"\n', "line 2"),
        ('a.mp4,"a" bird\n', "line 2"),
        ("a.mp4," + '"' + "x" * (1 << 21) + "\n", "line 2"),
        ("a.mp4,one\nb.mp4,t\0wo\n", "line 3"),
        (b"file_name,caption\na.mp4,one\nb.mp4,caf\xe9\n", "line 3"),
        (b"file_name,caption\na.mp4,\xed\xa0\x80\n", "line 2"),  # a lone surrogate
        ("file_name,caption\na.mp4,one\n".encode("utf-16"), ""),
        # Spreadsheets extend the header if one row has a comma too many; that row's caption would be cut.
        (b"file_name,caption,\na.mp4,one,\nb.mp4,a bird, flying\n", "line 3"),
    ],
)  # fmt: skip
def test_what_would_damage_a_caption_is_refused_by_its_line(tmp_path, content, line):
    content = content if isinstance(content, bytes) else f"file_name,caption\n{content}"
    assert line in refused_table(tmp_path / "a.csv", content)


@pytest.mark.parametrize(
    "header", ["file_name;caption", '"file_name"\t"caption"', "file_name,caption,caption", "a.mp4,a"]
)
def test_headers_that_are_none(tmp_path, header):
    refused_table(tmp_path / "a.csv", f"{header}\na.mp4;one\n")


def test_line_breaks_and_quotes_that_are_meant(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        'file_name,caption\na.mp4, "one, two\nthree, four"\nb.mp4,a 5" screen\n\nc.mp4,"said ""no"""\nd.mp4\n'
    )
    rows = read_table(path, ("file_name", "caption"), "data.path")
    assert [(line, *values) for line, values in rows] == [
        (2, "a.mp4", "one, two\nthree, four"),
        (4, "b.mp4", 'a 5" screen'),
        (6, "c.mp4", 'said "no"'),
        (7, "d.mp4", None),
    ]


def test_a_swallowed_row_of_a_captions_file(tmp_path):
    content = 'id,caption\n1,"a bird\n2,a cat\n3,a dog"\n'
    assert "line 2" in refused_table(tmp_path / "a.csv", content, ("caption",))
    (tmp_path / "c.csv").write_text('id,caption\n1,"In the first shot, a bird\nin the second, a cat"\n')
    assert read_captions(tmp_path / "c.csv") == ["In the first shot, a bird\nin the second, a cat"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "caption\na bird, flying\n"),
        ("a.csv", "caption;id\na bird;1\n"),
        ("a.txt", "file_name,caption\na.mp4,a bird\n"),
        ("a.txt", "one\0\n"),
        ("a.txt", "\n  \n"),
        ("a.txt", "caf\xe9"),
        ("a.csv", "file_name,text\nx.mp4,one\n"),
        ("a.csv", ""),
    ],
)
def test_captions_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with refused(f"data.path={tmp_path / name}"):
        read_captions(tmp_path / name)


def test_lines_of_a_text_file_are_what_editors_show(tmp_path):
    (tmp_path / "a.txt").write_text('one, two\r\n"three"\rfour\u2028five\n', newline="")
    assert read_captions(tmp_path / "a.txt") == ["one, two", '"three"', "four\u2028five"]


@pytest.mark.parametrize("name", ["/etc/hostname", "../a.mp4", "sub/../../a.mp4", "..", '"a\nb"', '" "'])
def test_files_outside_the_folder_are_refused(tmp_path, name):
    (tmp_path / "metadata.csv").write_text(f"file_name,caption\n{name},one\n")
    with refused("line 2"):
        read_metadata(tmp_path)


def test_files_in_sub_folders_are_taken(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,caption\nsub/../x/a.mp4,one\n..a.mp4,two\n")
    rows = [(row.file, row.caption) for row in read_metadata(tmp_path)]
    assert rows == [("sub/../x/a.mp4", "one"), ("..a.mp4", "two")]


@pytest.mark.parametrize(
    "values",
    [
        "1,1,",
        "2,1,",
        "-1,1,",
        "x,1,",
        "nan,1,",
        "00:01,,",
        "0,1,[0;5]",
        ",,30-60",
        ",,[30]",
        ',,"[60,30]"',
        ',,"[0.5,3]"',
    ],
)
def test_parts_of_a_video_that_are_none(tmp_path, values):
    (tmp_path / "metadata.csv").write_text(f"file_name,caption,start,end,cut\na.mp4,one,,,\na.mp4,two,{values}\n")
    with refused("line 3"):
        read_metadata(tmp_path)
    ignored = dict.fromkeys(("start", "end", "cut"), "")
    assert [row.name for row in read_metadata(tmp_path, ignored)] == ["a.mp4", "a.mp4"]
    (tmp_path / "metadata.csv").write_text(f",file_name,caption,start,end,cut\n0,a.mp4,one,{values}\n")
    assert [row.span for row in read_metadata(tmp_path, ignored)] == [None], "row numbers of pandas are no part"
    with refused("begin"):  # a name that was given must be there
        read_metadata(tmp_path, {**ignored, "start": "begin"})


def test_parts_of_a_video_in_both_tables(tmp_path):
    (tmp_path / "metadata.csv").write_text(
        'file_name,caption,from,end,cut\na.mp4,one,0.5,1,\na.mp4,two,1.5,,\na.mp4,three,,,"[30, 60]"\na.mp4,four,,,\n'
    )
    spans = [row.span for row in read_metadata(tmp_path, {"start": "from"})]
    assert spans == [(0.5, 1, "s"), (1.5, float("inf"), "s"), (30, 60, "frames"), None]
    (tmp_path / "metadata.csv").unlink()
    rows = [{"start": 0.5, "end": 1}, {"start": "1.5"}, {"cut": [30, 60]}, {"cut": None}]
    lines = [json.dumps({"file_name": "a.mp4", "caption": "x", **row}) for row in rows]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    assert [row.span for row in read_metadata(tmp_path)] == spans
    before = own.read(tmp_path, has_clips=True)
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines).replace("60", "61"))
    after = own.read(tmp_path, has_clips=True)
    assert before.table_hash() != after.table_hash(), "the set of another part is another set"
    assert before.sizes() != after.sizes(), "and a run does not resume on it"
