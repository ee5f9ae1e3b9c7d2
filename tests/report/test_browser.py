"""The page in headless Chromium: every chart drawn, nothing to complain of, at any width, light and dark."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from batchgen.report.page import write_report
from tests.report.made_jobs import answer, step, token, write_job
from tests.report.test_page import hostile_job

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

PROBE = """
<script>
const look = () => {
  if (!document.body.dataset.drawn && document.querySelector(".chart")) return setTimeout(look, 20);
  const charts = [...document.querySelectorAll(".chart")].map((place) => {
    const marks = [...place.querySelectorAll("svg .mark-area path, svg .mark-rect path, svg .mark-line path")];
    const size = place.querySelector("svg")?.getBoundingClientRect();
    const label = place.querySelector("svg text");
    return {
      id: place.id, width: size?.width, place: place.getBoundingClientRect().width,
      drawn: marks.filter((mark) => mark.getBBox().width > 0).length, ink: label && getComputedStyle(label).fill,
    };
  });
  const seen = {
    charts, errors: document.getElementById("errors").textContent, broken: window.broken ?? null,
    wide: document.documentElement.scrollWidth, view: innerWidth, page: getComputedStyle(document.body).backgroundColor,
  };
  parent.postMessage(seen, "*");
};
look();
</script>
"""


# A window is never narrower than 500 px; a frame can be.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<iframe src="{name}" style="border: 0; width: {width}px; height: 900px"></iframe><pre id="seen"></pre>
<script>onmessage = (event) => {{ document.getElementById("seen").textContent = JSON.stringify(event.data); }};</script>
"""


def look(path: Path, folder: Path, width: int = 1280, dark: bool = False) -> dict[str, Any]:
    """What the probe sees of a copy of the page; `console` has what the browser logged."""
    copy, frame = folder / "probed.html", folder / "frame.html"
    copy.write_text(PROBE.join(path.read_text("utf-8").rpartition("</body>")[0::2]), "utf-8")
    frame.write_text(FRAME.format(name=copy.name, width=width), "utf-8")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"),
        *("--window-size=1700,1000", f"--blink-settings=preferredColorScheme={int(not dark)}"),
        *("--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", frame.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    seen = html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)[1])  # type: ignore[index]
    assert seen, "the probe did not finish"
    return {**json.loads(seen), "console": [line for line in done.stderr.splitlines() if "CONSOLE" in line]}


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(hostile_job(tmp_path_factory.mktemp("made") / "job")).path


@pytest.mark.parametrize(("width", "dark"), [(1600, False), (400, True)])
def test_every_chart_is_drawn(report: Path, tmp_path: Path, width: int, dark: bool):
    seen = look(report, tmp_path, width, dark)
    assert (seen["errors"], seen["broken"], seen["console"]) == ("", None, [])
    assert len(seen["charts"]) == 10
    for chart in seen["charts"]:
        assert chart["drawn"] >= 1, chart
        assert 0 < chart["width"] <= chart["place"] + 1, chart
        assert chart["ink"] == ("rgb(154, 166, 182)" if dark else "rgb(93, 104, 120)"), chart
    assert seen["wide"] <= seen["view"] == width
    assert seen["page"] == ("rgb(18, 22, 29)" if dark else "rgb(246, 247, 249)")


@pytest.mark.parametrize("count", [0, 1])
def test_the_smallest_jobs(tmp_path: Path, count: int):
    rows = [step(0, 0, 0.5, num_prefill_tokens=10, num_seqs=1, pages_used=1), step(1, 0.5, 0.5)][: 2 * count]
    tokens = [token(0, k, k) for k in range(2)][: 2 * count]
    path = write_job(tmp_path / "job", [answer(i) for i in range(count)], rows, tokens)
    seen = look(write_report(path).path, tmp_path)
    assert (seen["errors"], seen["console"]) == ("", [])
    assert [chart["drawn"] > 0 for chart in seen["charts"]] == [True] * (10 * count)


def test_an_error_in_the_page_is_seen(report: Path, tmp_path: Path):
    """Or the tests above could not fail."""
    broken = tmp_path / "broken.html"
    text = report.read_text("utf-8")
    broken.write_text(text.replace("const draw =", "specs.kv = {mark: 7};\nconst draw =", 1), "utf-8")
    seen = look(broken, tmp_path)
    assert seen["errors"].startswith("kv: ")
    assert [chart["id"] for chart in seen["charts"] if not chart["drawn"]] == ["chart-kv"]
    broken.write_text(text.replace("const draw =", "Promise.reject('late'); const draw =", 1), "utf-8")
    assert look(broken, tmp_path)["errors"] == "late\n"
