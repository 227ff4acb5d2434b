"""The report: what it shows, that it needs nothing else, and that what models write stays text.

In a real browser where there is one, by what the page holds and whether its canvases are drawn on, not by pixels.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.batch import RolloutBatch
from app.text import printable
from callbacks.report.charts import charts, held_out_curve, lines, reward_curve, step_parts
from callbacks.report.moments import batch_moment
from callbacks.report.page import page, write_page
from callbacks.report.runs import RunData
from tests.callbacks.report.hostile import HOSTILE, run
from tests.helpers.browser import INKED, PHONE, opened
from tests.helpers.pictured import picture, pictured


def data_of(html: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return json.loads(text)


def test_what_it_says() -> None:
    html = page([run()])
    for said in (
        "toy/now",
        "0.200 → 0.800",
        "+0.600",
        "better; 95% interval",
        "4.00 x fewer",
        "Highest reward",
        "this at 10",
    ):
        assert said in html, said
    assert "1 more groups are not shown" in json.dumps(data_of(html))


def test_nothing_is_fetched() -> None:
    html = page([run()])
    without_scripts = re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!#)""", without_scripts)
    assert "default-src 'none'" in html and "http-equiv" in html


def test_hostile_text_opens_and_closes_no_element() -> None:
    plain, hostile = page([run(texts=("a", "b", "c"))]), page([run(HOSTILE[0], HOSTILE)])
    for tag in ("script", "/script", "img", "svg", "body", "/body", "/html", "!--"):
        count = [
            len(re.findall(f"<{tag}", re.sub(r"<script>.*?</script>", "", one, flags=re.DOTALL)))
            for one in (plain, hostile)
        ]
        assert count[0] == count[1], tag
    assert data_of(hostile)["runs"][0]["batches"][0]["tree"]["text"][0] == HOSTILE[0]
    hostile.encode("utf-8")  # no half of a character left


def test_intervals_are_over_prompts() -> None:
    one = run()
    (step, accuracy, low, high), _ = held_out_curve(one)
    assert (step, accuracy) == (0, 0.2) and 0.05 < low < 0.1 and 0.4 < high < 0.45  # Wilson's, 4 of 20
    bare = replace(one, held_out=[])
    assert held_out_curve(bare) == [(0, 0.2, 0.2, 0.2), (10, 0.8, 0.8, 0.8)]


def test_cards_say_of_which_steps_they_are() -> None:
    """A run that was gone on with has the seconds of its last launch; every tenth step is logged, say."""
    steps = [10.0, 20.0]
    series = {
        f"tokens/{name}": (steps, [count] * 2) for name, count in (("dense", 30.0), ("leaf", 20.0), ("tree", 10.0))
    }
    resumed = RunData("resumed", series=series, summary={"seconds": 120, "steps": 5})
    text = page([resumed])
    assert "2.0 min for the 5 of the last launch" in text and "2.0 min in all" not in text
    assert "3.00 x fewer" in text and "20, not 60 as one by one in the 2 steps that were logged;" in text
    text = page([replace(resumed, summary={"seconds": 120, "steps": 20})])
    assert "2.0 min in all" in text
    every = {name: ([1.0, 2.0], values) for name, (_, values) in series.items()}
    assert "20, not 60 as one by one; 2.00 x" in page([RunData("every", series=every)])


def test_the_band_of_the_reward_covers_its_mean() -> None:
    """At 60 steps it is of three values each: 1.96 standard errors, of which it was made, cover 0.82 of the time."""
    steps, random, inside = [float(step) for step in range(1, 61)], np.random.default_rng(3), []
    for _ in range(40):
        plot = reward_curve([RunData("noise", series={"reward": (steps, random.normal(0.5, 0.1, 60).tolist())})])
        assert plot is not None
        (band,) = (mark for mark in plot.marks if mark["kind"] == "band")
        inside += [low <= 0.5 <= high for low, high in zip(band["low"], band["high"], strict=True)]
    assert 0.92 < np.mean(inside) < 0.98


def test_a_band_without_width_is_seen_and_few_values_have_none() -> None:
    steps = [float(step) for step in range(1, 61)]
    plot = reward_curve([RunData("alike", series={"rollouts/reward": (steps, [0.5] * 60)})])
    assert plot is not None
    kinds = [(mark["kind"], len(mark["x"]), mark.get("width")) for mark in plot.marks]
    assert kinds == [("line", 60, None), ("band", 58, None), *[("line", 58, 6)] * 2, ("line", 60, 2)]
    assert all(mark["y"] == [0.5] * 58 for mark in plot.marks[2:4])
    plot = reward_curve([RunData("short", series={"rollouts/reward": (steps[:59], [0.5] * 59)})])
    assert plot is not None and [mark["kind"] for mark in plot.marks] == ["line", "line"]


def test_parts_of_a_step_add_up() -> None:
    split = step_parts(run().series)
    assert split is not None and sum(values[0] for values in split[1].values()) == 2.0 and split[1]["other"][0] == 0.5
    assert step_parts({}) is None


def test_logarithms_take_what_is_above_zero() -> None:
    flat = RunData("flat", series={"x": ([1.0], [0.0])})
    assert lines([flat], ["x"], log=True) is None and lines([flat], ["x"]) is not None and lines([flat], ["y"]) is None


def test_long_series_are_thinned_and_say_so() -> None:
    steps = [float(step) for step in range(1, 2001)]
    long = RunData("long", series={"entropy": (steps, [math.sin(step) for step in steps])})
    (chart,) = charts([long])
    (line,) = chart.plot.marks
    assert len(line["x"]) == 500 and line["x"][0] == 2.5
    assert "mean of 4 steps" in page([long])


def test_of_the_coach_the_latest_lines_are_shown_and_the_others_counted() -> None:
    def coached(lines: int) -> RunData:
        said = [{"step": step, "advice": [{"finding": f"found {step}."}]} for step in range(lines)]
        return replace(run(), coach=said)

    text = page([coached(1203)])
    assert "1,003 earlier lines are in coach.jsonl" in text
    assert text.count("<td>found ") == 200 and "found 1003." in text and "found 1002." not in text
    assert "2,006 earlier lines are in coach.jsonl" in page([coached(1203)] * 2)
    assert "earlier lines" not in page([coached(200)])


@pytest.mark.parametrize("runs", [[], [RunData("empty")], [run()] * 9])
def test_what_makes_no_report_is_refused(runs: list[RunData]) -> None:
    with pytest.raises(ValueError, match=r"one to 8 runs|empty: nothing was logged"):
        page(runs)


# ---- in a browser


def test_a_browser_draws_it_offline(tmp_path: Path) -> None:
    write_page([run(children=4000)], tmp_path / "report.html")
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]
    seen: list[str] = []
    with opened(tmp_path / "report.html", seen) as page:
        boxes = page.locator(".chart")
        assert boxes.count() == 6
        for i in range(boxes.count()):
            boxes.nth(i).scroll_into_view_if_needed()
            assert boxes.nth(i).evaluate(INKED), i
        tree = page.locator("#tree")
        assert tree.evaluate(INKED) and tree.get_attribute("data-drawn") == "4001"
        tree.scroll_into_view_if_needed()
        tree.click(position={"x": 20, "y": 100})
        assert "10 tokens from position 0, shared by 4000 of 4000 sequences" in page.inner_text("#node-about")
        tree.press("ArrowRight")
        assert (
            "advantage 1; mean reward 1" in page.inner_text("#node-about")
            and page.inner_text("#node-text") == "what is it?this"
        )
        assert tree.get_attribute("data-drawn") == "2"  # the box and what leads to it
        page.click("#tree-all")
        page.select_option("#tree-step", "0")
        page.select_option("#tree-colour", "sequences")
        assert tree.get_attribute("data-drawn") == "4001" and page.inner_text("#scale-high") == "4000"
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert seen == []


def test_a_browser_shows_pictures_where_they_stand(tmp_path: Path) -> None:
    first, second = picture(0, height=60, width=90), picture(1, height=60, width=90)
    shown = [pictured([1, first, 2, *([second, 5] if k else [6])], episode_id=k, reward=float(k)) for k in range(2)]
    found = run()
    found.batches = [{"step": 1, **batch_moment(RolloutBatch.from_trajectories(shown), None)}]
    write_page([found], tmp_path / "report.html")
    seen: list[str] = []
    with opened(tmp_path / "report.html", seen) as page:
        tree = page.locator("#tree")
        page.wait_for_function("document.getElementById('tree').dataset.pictures === '2'")
        tree.click(position={"x": 5, "y": 100})
        assert page.inner_text("#node-text") == "1 [picture 1] 2"
        tree.press("ArrowRight")  # what goes on in text
        tree.press("ArrowDown")
        thumbnails = page.locator("#node-pictures img")
        assert [thumbnails.nth(k).get_attribute("title") for k in range(thumbnails.count())] == [
            "picture 1",
            "picture 2",
        ]
        assert page.locator("#node-pictures img.said").get_attribute("title") == "picture 2"
        inline = page.locator("#transcripts ~ .strip .text img")
        assert inline.count() == 2 + 1 + 1  # of best, surprising and worst
        assert all(inline.nth(k).evaluate("(one) => one.naturalWidth") == 90 for k in range(inline.count()))
    assert seen == []


def test_what_is_no_thumbnail_is_text(tmp_path: Path) -> None:
    found = run()
    found.batches[0]["thumbnails"] = ["https://example.org/a.png", "data:image/svg+xml,<svg/>", 7]
    found.batches[0]["transcripts"]["best"]["runs"] = [["https://example.org/b.png", None]]
    html = page([found])
    assert data_of(html)["runs"][0]["batches"][0]["thumbnails"] == ["", "", ""]
    assert '<span class="context">https://example.org/b.png</span>' in html


@pytest.mark.slow
def test_a_phone_shows_runs_laid_over_each_other_without_scrolling_sideways(tmp_path: Path) -> None:
    write_page([run("one"), run("two")], tmp_path / "report.html")
    seen: list[str] = []
    with opened(tmp_path / "report.html", seen, **PHONE) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator("#chart0").evaluate(INKED) and page.locator("#tree").evaluate(INKED)
        assert page.locator("#tree-run option").all_inner_texts() == ["one", "two"]
        page.locator("#tree").scroll_into_view_if_needed()
        page.locator("#tree").tap(position={"x": 300, "y": 20})
        assert "shared by 1 of 6" in page.inner_text("#node-about")
    assert seen == []


@pytest.mark.slow
def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path) -> None:
    write_page([run(HOSTILE[0], HOSTILE)], tmp_path / "report.html")
    seen: list[str] = []
    with opened(tmp_path / "report.html", seen) as page:
        assert page.evaluate("window.hacked") is None
        assert page.inner_text("h1") == HOSTILE[0]
        shown = page.locator("#transcripts ~ .strip .text").first.inner_text()
        for text in HOSTILE[:6]:
            assert printable(text) in shown
        page.locator("#tree").click(position={"x": 20, "y": 100})
        assert page.text_content("#node-text") == HOSTILE[0]
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    assert seen == []
