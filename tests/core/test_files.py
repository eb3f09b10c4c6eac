"""Files that anybody may have written."""

import json
import math
import os
import threading
from pathlib import Path

import pytest

from leanbench.core import files


def fault(path: Path, most_mb: int = 1, inside: Path | None = None) -> files.FileFault:
    with pytest.raises(files.UnreadableFile) as refused:
        files.read_text(path, most_mb, inside)
    assert refused.value.path == path
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 400
    return refused.value.fault


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    faults = dict.fromkeys(("fifo", "zeros", "/dev/null"), files.FileFault.NOT_REGULAR)
    faults |= dict.fromkeys(("loop", "a\0b", "x" * 300), files.FileFault.SYSTEM)
    faults |= dict.fromkeys(("gone", "gone/below"), files.FileFault.MISSING) | {
        ".": files.FileFault.FOLDER
    }
    assert {name: fault(tmp_path / name) for name in faults} == faults


def test_a_pipe_is_read_where_it_may_be(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert files.read_file(tmp_path / "fifo", 1, or_pipe=True) == b""
    reading, writing = os.pipe()
    os.write(writing, b"content")
    pipe = Path(f"/dev/fd/{reading}")
    assert fault(pipe) is files.FileFault.NOT_REGULAR
    # The writer may be slow.
    threading.Timer(0.05, lambda: (os.write(writing, b", and more"), os.close(writing))).start()
    assert files.read_file(pipe, 1, or_pipe=True) == b"content, and more"
    os.close(reading)


def test_no_more_than_the_limit_is_read(tmp_path):
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 2_000_000)
    assert len(files.read_file(path, 2)) == 2_000_000
    os.truncate(path, 2_000_001)
    assert fault(path, 2) is files.FileFault.TOO_LARGE
    os.truncate(path, 1 << 40)
    assert fault(path, 2) is files.FileFault.TOO_LARGE
    # The system reports a size of 0 for these.
    assert files.read_file(Path("/proc/self/status"), 1).startswith(b"Name:")
    assert fault(Path("/proc/self/status"), 0) is files.FileFault.TOO_LARGE


def test_a_file_names_others_in_its_folder_alone(tmp_path):
    root = tmp_path / "set"
    (root / "blob").mkdir(parents=True)
    (root / "blob" / "own").write_text("own")
    (root / "link").symlink_to("blob/own")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "set-two").mkdir()
    (tmp_path / "set-two" / "own").write_text("no")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    for name in ("blob/own", "link", "blob/../link", "up/set/link"):
        assert files.read_file(root / name, 1, root) == b"own"
    # Whether such a file exists is not told either.
    for name in ("../secret", "../none", "/etc/hostname", "out", "up/secret", "../set-two/own"):
        assert fault(root / name, inside=root) is files.FileFault.OUTSIDE
    # The folder itself may be named by a link.
    (tmp_path / "alias").symlink_to(root)
    assert files.read_file(tmp_path / "alias" / "link", 1, tmp_path / "alias") == b"own"


def test_text_is_utf8_with_or_without_its_mark(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffé\r\n".encode())
    assert files.read_text(path, 1) == "é\r\n"
    path.write_bytes(b"caf\xe9")
    assert fault(path) is files.FileFault.NOT_UTF8


def test_numbers_and_text_of_other_programs_are_read():
    digits = "1" * 5000
    text = f'{{"a": [Infinity, -Infinity, NaN, 1e400, -1e400, {digits}, -{digits}], "size": 64}}'
    numbers = files.parse_foreign_json(text)["a"]
    assert math.isnan(numbers.pop(2))
    assert numbers == [math.inf, -math.inf] * 2 + ["1" * 20 + "...", "-" + "1" * 19 + "..."]
    assert files.parse_foreign_json(f"[{2**63 - 1}, {-(2**63)}, 16]") == [2**63 - 1, -(2**63), 16]
    assert [type(n) for n in files.parse_foreign_json(f"[{2**63}, {10**30}, 16.0]")] == [float] * 3
    for number in ("Infinity", "-Infinity", "NaN", "1e400", digits, str(2**63)):
        with pytest.raises(ValueError, match=r"no (finite )?number"):
            files.parse_json(f'{{"a": {number}}}')
    with pytest.raises(ValueError, match=r"^it has a number of too many digits$"):
        files.parse_unchecked_json(digits)
    for read in (files.parse_json, files.parse_foreign_json):
        with pytest.raises(ValueError, match=r"^it is not UTF-8 text$"):
            read(r'"\ud800"')
    text = json.dumps({"\x1b[2J": ["a\r\n\x9b\u202e", 1, "é ≤ 東"]})
    assert files.printable_json(files.parse_foreign_json(text)) == {
        r"\x1b[2J": [r"a\r\n\x9b\u202e", 1, "é ≤ 東"]
    }


@pytest.mark.parametrize(
    "read", [files.parse_json, files.parse_foreign_json, files.parse_unchecked_json]
)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b" \n", "it is empty"),
        ("[" * 200_000, "it is nested too deep"),
        (b'"\xff"', "it is not UTF-8 text"),
        ("[1, 2", "no JSON at column 6"),
        ('{"a": 1}\n{"b"', "no JSON at line 2, column 1"),
    ],
    ids=["empty", "deep", "bytes", "cut", "lines"],
)
def test_faults_of_json_are_told_in_words_of_this_project(read, text, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        read(text)
