"""Tables of captions: what is read, against Python's own writer; and what would damage a caption, by its line."""

import csv
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distill.data.captions import read_captions
from distill.data.table import read_table
from distill.data.video_folder import read_metadata
from fsdp_cp.errors import UserError

QUICK = settings(max_examples=60, deadline=None, derandomize=True)


def refusal(path, content: str | bytes, columns=("file_name", "caption")) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UserError) as error:
        read_table(path, columns, f"data.path: {path}")
    message = str(error.value)
    assert message.startswith(f"data.path: {path}") and "\n" not in message
    return message.removeprefix(f"data.path: {path}")


PRINTABLE = st.characters(exclude_categories=("Cs", "Cc"))
CAPTION = st.text(st.one_of(PRINTABLE, st.sampled_from(',;"\n\t|')), max_size=40)


@QUICK
@given(captions=st.lists(CAPTION, min_size=1, max_size=6), ends=st.sampled_from(["\n", "\r\n"]), mark=st.booleans())
def test_what_a_spreadsheet_writes_comes_back_with_its_lines(tmp_path_factory, captions, ends, mark):
    """Any caption survives, quotes, commas and line breaks in it; the line numbers are the file's."""
    path = tmp_path_factory.mktemp("table") / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig" if mark else "utf-8") as file:
        writer = csv.writer(file, lineterminator=ends, quoting=csv.QUOTE_ALL)
        writer.writerows([("caption", "file_name"), *((text, f"clip_{i}.mp4") for i, text in enumerate(captions))])
    rows = read_table(path, ("file_name", "caption"), "data.path")
    assert [row.values for row in rows] == [(f"clip_{i}.mp4", text) for i, text in enumerate(captions)]
    line = 2
    for row, text in zip(rows, captions, strict=True):
        assert row.line == line
        line += 1 + text.count("\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a.mp4,a bird\nb.mp4,a bird, flying\n", "line 3 has 3 fields for 2 columns; put captions with commas in"),
        ("a.mp4,a bird,\n", "line 2 has 3 fields for 2 columns"),
        ('a.mp4,"a bird\nb.mp4,a cat\nc.mp4,a dog\n', "has a double quote in line 2 that nothing closes"),
        ('x.mp4,"one\ntwo"\na.mp4,"a bird\nb.mp4,"a cat"\n', "double quote in line 4 that is not closed before line 5"),
        ('a.mp4,"a bird\nb.mp4,a cat\nc.mp4,a dog"\n', "opens in line 2 and holds line 3, which looks like a row"),
        ('a.mp4,"a bird\nb.MOV,"\n', "opens in line 2 and holds line 3, which looks like a row"),
        ('a.mp4,"a" bird\n', "has text behind a closing double quote in line 2"),
        ("a.mp4," + '"' + "x" * (1 << 21) + "\n", "has a double quote in line 2 that nothing closes"),
        ("a.mp4,one\nb.mp4,t\0wo\n", "is not UTF-8 text (a NUL byte in line 3)"),
        (b"file_name,caption\na.mp4,one\nb.mp4,caf\xe9\n", "is not UTF-8 text (line 3)"),
        (b"file_name,caption\na.mp4,\xed\xa0\x80\n", "is not UTF-8 text (line 2)"),  # a lone surrogate
        ("file_name,caption\na.mp4,one\n".encode("utf-16"), "is not UTF-8 text but UTF-16; save it as UTF-8"),
        ("file_name,caption\na.mp4,one\n".encode("utf-16-le"), "is not UTF-8 text (a NUL byte in line 1)"),
    ],
)  # fmt: skip
def test_what_would_damage_a_caption_is_refused_by_its_line(tmp_path, content, words):
    assert words in refusal(
        tmp_path / "a.csv", content if isinstance(content, bytes) else f"file_name,caption\n{content}"
    )


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("file_name;caption", "separates its columns with semicolons; save it with commas"),
        ('"file_name"\t"caption"', "separates its columns with tabs; save it with commas"),
        ("file_name|caption|licence", "separates its columns with bars; save it with commas"),
        ("file_name,caption,caption", "has the column 'caption' twice in line 1"),
        ("file_name, caption,x,x", "has the column 'x' twice in line 1"),
        ("a.mp4,a bird", "has no column file_name (found a.mp4,a bird)"),
    ],
)
def test_headers_that_are_none(tmp_path, header, words):
    assert words in refusal(tmp_path / "a.csv", f"{header}\na.mp4;one\n")


def test_a_column_without_a_name_takes_no_value(tmp_path):
    """Spreadsheets fill up the header where one row has a comma too many: that row's caption would be cut."""
    words = refusal(tmp_path / "a.csv", "file_name,caption,\na.mp4,one,\nb.mp4,a bird, flying\n")
    assert "line 3 has 3 fields for 2 columns" in words


def test_line_breaks_and_quotes_that_are_meant(tmp_path, caplog):
    path = tmp_path / "a.csv"
    path.write_text(
        'file_name,caption\na.mp4, "one, two\nthree, four"\nb.mp4,a 5" screen\n\nc.mp4,"said ""no"""\nd.mp4\n'
    )
    with caplog.at_level(logging.INFO):
        rows = read_table(path, ("file_name", "caption"), "data.path")
    assert [(row.line, *row.values) for row in rows] == [
        (2, "a.mp4", "one, two\nthree, four"),
        (4, "b.mp4", 'a 5" screen'),
        (6, "c.mp4", 'said "no"'),
        (7, "d.mp4", None),
    ]
    assert "1 rows of" in caplog.text and "hold line breaks" in caplog.text


def test_a_swallowed_row_of_a_captions_file(tmp_path):
    content = 'id,caption\n1,"a bird\n2,a cat\n3,a dog"\n'
    assert "opens in line 2 and holds line 3" in refusal(tmp_path / "a.csv", content, ("caption",))
    assert "opens in line 2 and holds line 3" in refusal(
        tmp_path / "b.csv", 'caption,file_name\n"a bird,a.mp4\na cat,b.mp4\na dog",c.mp4\n', ("caption",)
    )
    (tmp_path / "c.csv").write_text('id,caption\n1,"In the first shot, a bird\nin the second, a cat"\n')
    assert read_captions(tmp_path / "c.csv") == ["In the first shot, a bird\nin the second, a cat"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "caption\na bird, flying\n", "line 2 has 2 fields for 1 columns"),
        ("a.csv", 'caption\n"a bird\na cat\n', "a double quote in line 2 that nothing closes"),
        ("a.csv", "caption;id\na bird;1\n", "separates its columns with semicolons"),
        ("a.txt", "file_name,caption\na.mp4,a bird\n", "begins with the header of a table; name it .csv"),
        ("a.txt", "one\0\n", "is not UTF-8 text (a NUL byte in line 1)"),
        ("a.tsv", "caption\n", "ends in .tsv; give a text file"),
    ],
)
def test_captions_files(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        read_captions(tmp_path / name)
    assert words in str(error.value) and str(error.value).startswith(f"data.path={tmp_path / name}")


def test_lines_of_a_text_file_are_what_editors_show(tmp_path):
    (tmp_path / "a.txt").write_text('one, two\r\n"three"\rfour\u2028five\n', newline="")
    assert read_captions(tmp_path / "a.txt") == ["one, two", '"three"', "four\u2028five"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/etc/hostname", "line 2 names '/etc/hostname', which is outside the folder"),
        ("../a.mp4", "line 2 names '../a.mp4', which is outside the folder"),
        ("sub/../../a.mp4", "which is outside the folder; use a path relative to"),
        ("..", "which is outside the folder"),
        ('"a\nb"', "a line break in the file_name of line 2"),
        ('" "', "no file_name in line 2"),
    ],
)
def test_files_outside_the_folder_are_refused(tmp_path, name, words):
    (tmp_path / "metadata.csv").write_text(f"file_name,caption\n{name},one\n")
    with pytest.raises(UserError) as error:
        read_metadata(tmp_path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_files_in_sub_folders_are_taken(tmp_path):
    (tmp_path / "metadata.csv").write_text("file_name,caption\nsub/../x/a.mp4,one\n..a.mp4,two\n")
    rows = [(row.file, row.caption) for row in read_metadata(tmp_path)]
    assert rows == [("sub/../x/a.mp4", "one"), ("..a.mp4", "two")]
