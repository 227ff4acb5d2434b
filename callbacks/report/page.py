"""`report.html`: one file that needs nothing else, from runs and recordings.

Promises: opens offline, without a network request (its content policy allows none, and no script but its own, by hash);
what models, tools and data files wrote is text, whatever it looks like, and names are cut to a line.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from app.statistics import paired
from app.text import printable
from callbacks.report.charts import MOST_POINTS, RUN_COLOURS, charts, held_out_curve, prompt_means, thinned
from callbacks.report.runs import RunData, spread

_HERE = Path(__file__).parent
_SECTIONS = {
    "learning": "Does it learn?",
    "time": "Where the time goes",
    "sampler": "Sampler and trainer",
    "rollouts": "Rollouts",
    "trees": "Prefix trees",
    "transcripts": "Transcripts",
    "heldout": "Held-out prompts",
    "coach": "The coach",
}
_COLUMNS = 6  # steps of a strip
_COACHED = 200  # lines of the coach, of a run
_THUMBNAIL = re.compile("data:image/jpeg;base64,[A-Za-z0-9+/=]+")
_KINDS = {"best": "Highest reward", "surprising": "Most surprising", "worst": "Lowest reward"}


def write_page(runs: Sequence[RunData], path: Path) -> None:
    """Writes the report of `runs` (at most as many as there are colours) to `path`, whole or not at all."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(page(runs), encoding="utf-8")
    aside.replace(path)


def page(runs: Sequence[RunData]) -> str:
    """The report as HTML.

    Raises:
        ValueError: no run, more than can be told apart, or nothing to show.
    """
    if not 1 <= len(runs) <= len(RUN_COLOURS):
        raise ValueError(f"a report is of one to {len(RUN_COLOURS)} runs, got {len(runs)}")
    drawn = charts(runs)
    sections: dict[str, list[Any]] = {}
    for chart in drawn:
        sections.setdefault(chart.section, []).append(chart)
    transcripts, held_out = _transcripts(runs), _held_out(runs)
    told = [_coach(run, len(runs) > 1) for run in runs]
    coach = [one for lines in told for one in lines[-_COACHED:]]
    earlier = sum(len(lines[:-_COACHED]) for lines in told)
    has_trees = any(run.batches for run in runs)
    if not (drawn or has_trees or held_out):
        raise ValueError(f"{', '.join(run.name for run in runs)}: nothing was logged or recorded yet; try again later")
    shown = {**sections, "trees": has_trees, "transcripts": transcripts, "heldout": held_out, "coach": coach}
    data = {
        "charts": {chart.key: vars(chart.plot) for chart in drawn},
        "runs": [{"name": _text(run.name), "batches": [_batch(one) for one in run.batches]} for run in runs],
    }
    scripts = [_script(file.read_text("utf-8")) for file in (*_bokeh_js(), _HERE / "page.js")]
    template = Environment(autoescape=True, trim_blocks=True).from_string((_HERE / "page.html").read_text("utf-8"))
    return template.render(
        title=_text(", ".join(run.name for run in runs)),
        css=Markup((_HERE / "page.css").read_text("utf-8")),
        hashes=Markup(" ".join(f"'sha256-{_sha256(script)}'" for script in scripts)),
        runs=[_head(run, colour) for run, colour in zip(runs, RUN_COLOURS)],
        sections=[(key, name) for key, name in _SECTIONS.items() if shown.get(key)],
        charts=sections,
        has_trees=has_trees,
        transcripts=transcripts,
        held_out=held_out,
        coach=coach,
        coach_earlier=f"{earlier:,} earlier lines are in coach.jsonl." if earlier else "",
        foot=_foot(runs),
        # In a script element nothing but "<" can end it.
        data=Markup(json.dumps(_finite(data)).replace("<", "\\u003c")),
        scripts=[Markup(script) for script in scripts],
    )


def _bokeh_js() -> list[Path]:
    """BokehJS and its interface, out of the Python package, which is not imported: that takes a second."""
    found = importlib.util.find_spec("bokeh")
    assert found is not None and found.origin is not None, "bokeh is among the project's dependencies"
    return [Path(found.origin).parent / "server/static/js" / name for name in ("bokeh.min.js", "bokeh-api.min.js")]


def _script(text: str) -> str:
    """As HTML ends a script at the first `</script`, wherever it stands, and reads `<!--` in one."""
    return text.replace("</script", "<\\/script").replace("<!--", "<\\!--").strip()


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _finite(value: Any) -> Any:
    """JSON of browsers has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def _text(text: Any, most: int | None = 300) -> str:
    return printable(str(text), most)


def _head(run: RunData, colour: str) -> dict[str, Any]:
    return {"name": _text(run.name), "colour": colour, "about": _text(_about(run)), "cards": _cards(run),
            "notes": [_text(note) for note in run.notes]}  # fmt: skip


def _about(run: RunData) -> str:
    """Model, algorithm and sizes, as the configuration has them."""
    model = run.config.get("model", {}).get("init_args") or {}
    data = run.config.get("data", {}).get("init_args") or {}
    source = model.get("model") or {}
    said = [
        source.get("path") or (source.get("config") or {}).get("model_type"),
        ", ".join(str(model[key]) for key in ("objective", "advantage") if model.get(key)),
        f"{data['batch_size']} prompts x {data.get('group_size', 1)} samples" if data.get("batch_size") else "",
        f"staleness at most {data['max_staleness']}" if data.get("max_staleness") is not None else "",
    ]  # fmt: skip
    return "; ".join(str(one) for one in said if one)


def _cards(run: RunData) -> list[dict[str, str]]:
    cards = []
    curve = held_out_curve(run)
    if curve:
        (_, first, *_), (step, last, low, high) = curve[0], curve[-1]
        value = f"{first:.3f} → {last:.3f}" if len(curve) > 1 else f"{last:.3f}"
        about = f"at step {step:.0f}: 95% interval {low:.3f} to {high:.3f}" if low < high else f"at step {step:.0f}"
        cards.append({"name": "held-out accuracy", "value": value, "about": about})
    if len(run.held_out) > 1:
        before, after = prompt_means(run.held_out[0]), prompt_means(run.held_out[-1])
        both = sorted(before.keys() & after.keys())
        if len(both) > 1:
            found = paired([before[one] for one in both], [after[one] for one in both])
            cards.append({"name": f"the same {len(both):,} prompts, first and last validation",
                          "value": f"{found.difference:+.3f}", "about": found.in_words()})  # fmt: skip
    steps = max((steps[-1] for steps, _ in run.series.values() if steps), default=0)
    if steps:
        seconds = run.summary.get("seconds")
        each = run.series.get("time/step", ([], []))[1]
        pace = f"median {sorted(each)[len(each) // 2]:.3g} s a step" if each else ""
        launch = run.summary.get("steps", steps)  # the summary is of the last launch that ended
        whole = "in all" if launch == steps else f"for the {launch} of the last launch"
        took = f"{seconds / 60:.1f} min {whole}; " if isinstance(seconds, int | float) else ""
        cards.append({"name": "optimizer steps", "value": f"{steps:,.0f}", "about": took + pace})
    sums = {name: sum(run.series.get(f"tokens/{name}", ([], []))[1]) for name in ("dense", "leaf", "tree")}
    if sums["tree"]:
        logged = len(run.series["tokens/tree"][1])
        of_steps = f" in the {logged:,} steps that were logged" if logged < steps else ""
        of_leaf = f"{sums['leaf'] / sums['tree']:.2f} x fewer than without prefixes of others"
        about = f"{sums['tree']:,.0f}, not {sums['dense']:,.0f} as one by one{of_steps}; {of_leaf}"
        cards.append(
            {"name": "tokens computed", "value": f"{sums['dense'] / sums['tree']:.2f} x fewer", "about": about}
        )
    return [{key: _text(value) for key, value in card.items()} for card in cards]


def _label(row: dict[str, Any]) -> str:
    return _text(row.get("label") or f"step {row['step']}")


def _batch(one: dict[str, Any]) -> dict[str, Any]:
    tree = one["tree"]
    cut = (
        f"; {one['groups'] - one['groups_shown']:,} more groups are not shown"
        if one["groups_shown"] < one["groups"]
        else ""
    )
    small, pictures = [uri if _is_thumbnail(uri) else "" for uri in one.get("thumbnails", ())], one.get("pictures", 0)
    if pictures > len(small):
        cut += f"; {pictures - len(small):,} more pictures are not shown"
    return {
        "label": _label(one),
        "thumbnails": small,
        "credit": _text(one["credit"]),
        "sequences": one["sequences"],
        "about": f"{one['groups_shown']:,} groups, {len(tree['parent']):,} boxes, {sum(tree['length']):,} tokens in the"
        f" tree{cut}. Grey: nothing in it is trained.",
        "tree": {**tree, "text": [_text(text, None) for text in tree["text"]]},
    }


def _transcripts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        named = f", {run.name}" if len(runs) > 1 else ""
        for kind, title in _KINDS.items():
            cells = []
            for batch in spread([one for one in run.batches if kind in one["transcripts"]], _COLUMNS):
                one = batch["transcripts"][kind]
                turns = f", {one['turns']} turns" if one["turns"] > 1 else ""
                about = f"{one['prompt_id']}; {one['above']:+.3g} from its group; {one['finish']}{turns}"
                cells.append({"when": _label(batch), "reward": f"reward {one['reward']:.3g}", "about": _text(about),
                              "runs": _runs(one["runs"])})  # fmt: skip
            if cells:
                rows.append({"title": _text(title + named), "cells": cells})
    return rows


def _held_out(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        named = f", {run.name}" if len(runs) > 1 else ""
        rounds = spread(run.held_out, _COLUMNS)
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rounds:
            for name, one in row["sets"].items():
                for prompt, reply in one["replies"].items():
                    cell = {
                        "step": row["step"],
                        "reward": f"reward {reply['reward']:.3g}",
                        "runs": _runs(reply["runs"]),
                    }
                    found.setdefault((name, prompt), []).append(cell)
        rows += [{"title": _text(f"{name} {prompt}{named}"), "cells": cells} for (name, prompt), cells in found.items()]
    return rows


def _runs(runs: Sequence[Any]) -> list[tuple[str, bool | None]]:
    """Text, and whether the policy wrote it; None: a picture."""
    return [
        (text, None) if said is None and _is_thumbnail(text) else (_text(text, None), bool(said)) for text, said in runs
    ]


def _is_thumbnail(uri: Any) -> bool:
    return isinstance(uri, str) and _THUMBNAIL.fullmatch(uri) is not None


def _coach(run: RunData, named: bool) -> list[dict[str, Any]]:
    return [
        {"step": f"{run.name} {line['step']}" if named else line["step"], "finding": _text(one.get("finding", "")),
         "remedy": _text(one.get("remedy", ""))}
        for line in run.coach
        for one in line.get("advice", [])[:1]
    ]  # fmt: skip


def _foot(runs: Sequence[RunData]) -> str:
    each = thinned(runs)
    points = f" A point of a long line is the mean of {each:,} steps ({MOST_POINTS} points a line)." if each > 1 else ""
    return (
        "Made by Arborist from metrics.csv, report.jsonl and coach.jsonl; this file needs no network. Strips show at"
        f" most {_COLUMNS} steps, the first and the last among them.{points}"
    )
