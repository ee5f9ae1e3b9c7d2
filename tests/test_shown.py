"""What a user's text may do to a terminal: nothing."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen import cli, shown
from batchgen.yaml_text import read_yaml
from tests.report.made_jobs import answer, step, write_job

NASTY = "\x1b]0;t\x07é…\U0001f600\x9b2J\u202e\x7f\ndone"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain é…😀", "plain é…😀"),
        (NASTY, "\\x1b]0;t\\x07é…😀\\x9b2J\\u202e\\x7f\\ndone"),
        ("\udcff", "\\udcff"),  # a byte of a file name that is no UTF-8
    ],
)
def test_visible(text, expected):
    assert shown.visible(text) == expected


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_json_is_the_same_value_in_characters_that_are_safe(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    value = {NASTY: [NASTY, "\udcff", "a\nb", "\U000e0001"]}
    text = shown.json_text(value, stream)
    assert json.loads(text) == value
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.isascii() == (encoding != "utf-8")
    stream.write(text)


@pytest.mark.parametrize(("count", "text"), [(0, "0 values"), (1, "1 value"), (1200, "1,200 values")])
def test_counted(count, text):
    assert shown.counted(count, "value") == text


def ascii_output(*arguments: str, folder: Path) -> str:
    """What a command prints where only ASCII can be printed; it must end well."""
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parent.parent), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "batchgen", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_print_where_there_is_only_ascii(tmp_path: Path):
    jobs = [write_job(tmp_path / f"é{name}", [answer(0, text="…" + name)], [step(0, 0, 1)]) for name in "ab"]
    assert '  A: "\\u2026a"' in ascii_output("compare", *map(str, jobs), folder=tmp_path).splitlines()
    values = json.loads(ascii_output("compare", *map(str, jobs), "--json", folder=tmp_path))
    assert values["differences"][0]["a"] == "…a"
    assert f"report: {tmp_path}/\\xe9a/report.html" in ascii_output("report", str(jobs[0]), folder=tmp_path)
    (tmp_path / "job.yaml").write_text("model: {source: m}\ninput: {path: d, prompt: 'é… 😀'}\n", encoding="utf-8")
    resolved = read_yaml(ascii_output("validate", "job.yaml", "--resolved", folder=tmp_path), "resolved")
    assert resolved["input"]["prompt"] == "é… 😀"


def test_errors_are_lines_without_control_characters(tmp_path: Path, capsys):
    assert cli.main(["report", str(tmp_path / NASTY)]) == 1
    error = capsys.readouterr().err
    assert error == f"error: {tmp_path}/{shown.visible(NASTY)}: no such directory; name the output folder of a job\n"
    assert cli.main(["validate", str(tmp_path / "\x1b[2J")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_comparison_shows_no_control_characters(tmp_path: Path, capsys):
    def made(name: str) -> str:
        given = {"path": name, "prompt": NASTY + name}
        return str(write_job(tmp_path / name, [answer(0, text=NASTY + name)], [step(0, 0, 1)], input=given))

    assert cli.main(["compare", made("a"), made("b")]) == 0
    out, _ = capsys.readouterr()
    assert all(line.isprintable() for line in out.split("\n")) and "\\x9b2J" in out
