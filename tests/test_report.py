"""The report: one page that asks for nothing from outside, says what the figures say, and keeps user text as text."""

from __future__ import annotations

import itertools
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from conftest import random_transform
from hypothesis import given
from models import tiny_model

from oscar_kv.calibration.corpus import Text
from oscar_kv.calibration.overlap import Paragraphs, calibration_paragraphs, check_overlap
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate import plots, report
from oscar_kv.evaluate.baselines import build_baseline
from oscar_kv.evaluate.fidelity import evaluate
from oscar_kv.evaluate.plots import beside, bits_against_kl, kl_by_position, kl_limits, layer_errors, looks, pareto
from oscar_kv.geometry import model_geometry

pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'oscar-kv[report]'")
pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'oscar-kv[report]'")

VOID = {"meta", "br", "link", "img", "input", "hr"}
COMMAND = ["oscar", "eval", "my model", "--html", "a.html"]
LAYERS = {str(i): {"key_error": [0.1, 0.2], "value_error": [0.01 * (i + 1), 0.5]} for i in range(2)}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def results():
    model = tiny_model("llama", head_dim=64)
    geometry = model_geometry(model.config)
    layers = {g.index: random_transform(g.num_kv_heads, g.key_dim, seed=g.index) for g in geometry.packed}
    windows = [torch.randint(1, 256, (700,), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    kivi = build_baseline("kivi", geometry)
    methods = {"dense": None, "oscar": layers, "auto": layers, "kivi": kivi, "kivi (no windows)": kivi}
    config = OscarConfig(sink=4, recent=32, slack=0)
    found = []
    for name in ("builtin:evaluation", "<b>mine</b> & yours"):
        result = evaluate(
            model, geometry, windows, methods, config, Text(name, name), name="tiny", start=100,
            windows_of={"kivi (no windows)": (0, 128)},
        )  # fmt: skip
        result["settings"]["overlap"] = {"paragraphs": 3, "shared": {"builtin:calibration": 0}}
        result["settings"]["calibration"] = {
            "tokens": 512,
            "text": "builtin:calibration",
            "seq_len": 128,
            "text_sha256": "ab" * 32,
        }
        found.append(result)
    return found


def test_the_page_is_whole_and_asks_for_nothing(results):
    source = report.render(results, LAYERS, COMMAND)
    page = Page(source)
    names = [tag for tag, _ in page.tags]
    assert not {"script", "link", "img", "iframe", "object"} & set(names)
    for _, attributes in page.tags:
        for key, value in attributes.items():
            assert not key.startswith("on")
            if key in ("src", "href", "xlink:href"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,"))
    assert "@import" not in source
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?([^)]*)\)", source))
    assert re.findall(r"https?://[^\s\"'<]+", re.sub(r'xmlns(:\w+)?="[^"]*"', "", source)) == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = {a["xlink:href"][1:] for tag, a in page.tags if tag == "use"} | set(re.findall(r"url\(#([^)]*)\)", source))
    assert used <= set(ids)
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.tags
    pictures = [a for tag, a in page.tags if tag == "svg"]
    assert len(pictures) == 2 * 2 + 1
    assert all(a["role"] == "img" and len(a["aria-label"]) > 40 for a in pictures)
    assert names.count("table") == names.count("div") - 2  # every table in a box that scrolls; two boxes of plots


def test_the_page_says_what_the_results_say(results):
    text = Page(report.render(results, LAYERS, COMMAND)).text
    for result in results:
        for row in result["results"]:
            assert row["method"] in text
            if row["kl_mean"]:
                assert f"{row['kl_mean']:.4f}" in text
                assert f"to {row['kl_interval'][1]:.4f}" in text
            assert f"{100 * row['top1_agreement']:.2f}" in text
            assert f"{row['bits_per_element_128k']:.2f}" in text
        assert result["text_sha256"] in text
    assert "<b>mine</b> & yours" in text  # as text
    assert "oscar eval 'my model' --html a.html" in text
    assert "KIVI holds between none and 127 keys dense" in text
    assert "no dense tokens but the method's own residual window" in text
    assert "builtin:calibration: 0" in text
    assert torch.__version__ in text


def test_headline_names_auto_or_the_best_of_few_bits(results):
    rows = {row["method"]: row for row in results[0]["results"]}
    sentence = report.headline(results[0])
    assert sentence.startswith(
        f"On builtin:evaluation, auto stores the cache in {rows['auto']['bits_per_element_128k']:.2f} bits"
    )
    assert "1.0 times below that of the published recipe" in sentence
    without = {**results[0], "results": [rows["dense"], {**rows["kivi"], "kl_mean": 0.5}, {**rows["oscar"], "kl_mean": 0.1}]}
    assert report.best(without) == "oscar"
    assert "only the dense cache" in report.headline({**results[0], "results": [rows["dense"]]})


def test_only_the_dense_cache_is_a_page_too(results):
    dense = {**results[0], "results": results[0]["results"][:1]}
    Page(report.render([dense]))


def windows(result, count):
    """The result as if of this many windows; with one there are no intervals."""
    if count > 1:
        rows = result["results"]
    else:
        rows = [
            {**row, "kl_interval": None, "buckets": [{**b, "kl_interval": None} for b in row["buckets"]]}
            for row in result["results"]
        ]
    return {**result, "results": rows, "settings": {**result["settings"], "windows": count}}


def test_few_windows_are_said_first(results):
    one = Page(report.render([windows(results[0], 1)])).text
    assert "One window was measured, so there are no intervals" in one.split("Results on")[0]
    assert "95 %" not in one.split("The methods")[0].replace("KL, 95 % interval", "")  # no caption speaks of bars
    two = Page(report.render([windows(results[0], 2)])).text.split("Results on")[0]
    assert "an interval of 2 values is 12.7 standard errors wide to each side and says next to nothing" in two
    assert "were measured" not in Page(report.render([windows(results[0], 3)])).text.split("Results on")[0]


def test_a_single_bucket_is_not_drawn_again(results):
    rows = [{**row, "buckets": row["buckets"][:1]} for row in results[0]["results"]]
    assert len(results[0]["results"][0]["buckets"]) > 1
    bucket = rows[0]["buckets"][0]
    page = Page(report.render([{**results[0], "results": rows}]))
    assert f"all positions that count, {bucket['start']} to {bucket['end'] - 1}, lie in one bucket" in page.text
    assert "KL by position as a table" not in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 1


def test_columns_have_names_at_phone_width_too(results):
    page = Page(report.render(results))
    labels = [a.get("data-label") for tag, a in page.tags if tag == "td" and "data-label" in a]
    assert labels == ["SHA-256", "paragraphs shared with"] * 2
    assert "attr(data-label)" in report.render(results)


def test_a_command_is_broken_between_arguments_and_tells_no_home(results, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    given = ["oscar", "eval", "/home/someone/my models/a.gguf", "--text", "mine=/home/someone/t.txt", "--html=/home/someone"]
    given += ["/home/someoneelse/x", "/srv/home/someone/x", "a b"]
    shown = report.shown_command(given)
    assert shown[2:] == [
        "~/'my models/a.gguf'", "--text", "mine=~/t.txt", "--html=~", "/home/someoneelse/x", "/srv/home/someone/x", "'a b'",
    ]  # fmt: skip
    assert [word.replace("~", str(Path.home())) for word in shlex.split(" ".join(shown))] == given
    source = report.render(results, None, given)
    assert "/home/someone/" not in source.replace("/srv/home/someone/", "")
    assert "<span>--text</span> <span>mine=~/t.txt</span>" in source
    monkeypatch.setenv("HOME", "/")
    assert report.shown_command(["/a"]) == ["/a"]


def test_what_a_method_stores_is_not_said_to_be_less(results):
    """KIVI's codes have 2 bits; with scale and minimum for every 32 of them it stores 3, as its row says."""
    text = Page(report.render(results)).text
    assert "so 3 bits per number are stored" in text
    row = next(r for r in results[0]["results"] if r["method"] == "kivi")
    assert row["bits_per_element_128k"] == pytest.approx(3, abs=0.05)
    assert not [name for name, said in report.DESCRIPTIONS.items() if re.search(r"[24] bits", said) and name != "fp8"]


def test_overlap_is_said_in_the_page(results):
    settings = {**results[0]["settings"], "overlap": {"shared": {"builtin:calibration": 7}}}
    page = Page(report.render([{**results[0], "settings": settings}]))
    assert "shares 7 paragraphs with builtin:calibration, which the method was made on: not a fair figure" in page.text


def test_errors_by_layer_are_drawn_where_they_are_recorded():
    assert layer_errors({"0": {"key_eigenvalues": [1.0]}}, "x") == ""
    assert layer_errors({}, "x") == ""
    label = re.search('aria-label="([^"]*)"', layer_errors(LAYERS, "x"))[1]
    assert label == "Error by layer and head, 0.01 to 0.5; most for the values of layer 1, head 1"


@pytest.fixture
def drawn(monkeypatch):
    """The axes of every plot that is made, before they become text."""
    found = []
    monkeypatch.setattr(plots, "_svg", lambda figure, salt, label: found.append(figure.axes[0]) or "<svg/>")
    return found


def entry(method, kl, interval, bits=2.5, **more):
    return {"method": method, "kl_mean": kl, "kl_interval": interval, "bits_per_element_128k": bits, **more}


def bars(axes):
    """``x, bottom, top`` of the bars, and ``x, y`` of the caps."""
    segments = [c.get_segments()[0] for c in axes.collections]
    caps = [tuple(map(float, p)) for line in axes.lines if line.get_marker() == "_" for p in line.get_xydata()]
    return [(float(s[0][0]), float(s[0][1]), float(s[1][1])) for s in segments], caps


def test_bars_are_capped_at_the_ends_of_intervals_and_open_where_the_axis_has_none(drawn):
    rows = [
        entry("capped", 1.0, [0.75, 3.0], 2.0),
        entry("alone", 1.0, None, 3.0),
        entry("open", 2.0, [0.0, 5.0], 4.0),  # 0 is nowhere on a log scale
        entry("far", 2.0, [0.01, 5.0], 6.0),  # nor would 0.01 leave room for the others
    ]
    plot = bits_against_kl({"text": "t", "results": rows}, "b")
    low, high = drawn[0].get_ylim()
    assert 0.5 < low < 0.75
    assert 5 < high < 7
    found, caps = bars(drawn[0])
    assert found == [(2.0, 0.75, 3.0), (4.0, low, 5.0), (6.0, low, 5.0)]
    assert caps == [(2.0, 0.75), (2.0, 3.0), (4.0, 5.0), (6.0, 5.0)]
    assert "without a lower cap goes on below the axis" in plot.caption
    assert "without a lower cap" not in bits_against_kl({"text": "t", "results": rows[:2]}, "b").caption
    buckets = [{**r, "start": 100 * i, "end": 100 * i + 100} for i, r in enumerate(rows)]
    plot = kl_by_position({"text": "t", "results": [entry("a", 1.0, None, buckets=buckets)]}, "p")
    found, caps = bars(drawn[2])
    assert [x for x, _, _ in found] == [0.0, 2.0, 3.0]
    assert [x for x, _ in caps] == [0.0, 0.0, 2.0, 3.0]
    assert "without a lower cap" in plot.caption
    assert "side by side" not in plot.caption


def test_an_axis_holds_every_mean_and_no_more_than_a_decade_below():
    low, high = kl_limits([entry("a", 0.0, None), entry("b", 1.0, [1e-9, 50.0]), entry("c", 2.0, [0.2, 3.0])])
    assert 0.1 < low < 0.2
    assert high > 50


def test_the_caption_speaks_of_a_line_only_where_there_is_one(drawn):
    crowd = [entry("a", 0.1, [0.05, 0.15], 2.5), entry("b", 0.2, [0.1, 0.3], 2.5), entry("c", 0.3, [0.1, 0.5], 3.0)]
    plot = bits_against_kl({"text": "t", "results": crowd}, "b")
    assert "grey line" not in plot.caption
    assert "No method here has fewer bits or less KL than a." in plot.caption
    assert not [line for line in drawn[0].lines if line.get_drawstyle() == "steps-post"]
    plot = bits_against_kl({"text": "t", "results": [*crowd, entry("d", 0.01, None, 8.0)]}, "b")
    assert "grey line joins" in plot.caption
    (line,) = [line for line in drawn[1].lines if line.get_drawstyle() == "steps-post"]
    marks = {line.get_label(): tuple(map(float, line.get_xydata()[0])) for line in drawn[1].lines}
    assert [tuple(map(float, p)) for p in line.get_xydata()] == [marks["a"], marks["d"]]
    assert "than" not in bits_against_kl({"text": "t", "results": crowd[:1]}, "b").caption


def test_methods_of_equal_bits_stand_side_by_side(drawn):
    rows = [entry(name, 0.1, [0.05, 0.2]) for name in "abcd"]
    plot = bits_against_kl({"text": "t", "results": rows}, "b")
    places = [x for x, _, _ in bars(drawn[0])[0]]
    low, high = drawn[0].get_xlim()
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert min(steps) == pytest.approx(max(steps))
    assert min(steps) / (high - low) > 0.015  # several pixels at the width of a phone
    assert low < min(places) < max(places) < high
    assert sum(places) / 4 == pytest.approx(2.5)
    moved = float(re.search(r"side by side, up to ([\d.]+) bits aside", plot.caption)[1])
    assert max(abs(x - 2.5) for x in places) <= moved < max(abs(x - 2.5) for x in places) + 0.01
    rows = [entry("low", 0.1, [0.05, 0.2]), entry("high", 3.0, [2.0, 4.0])]  # neither hides the other
    plot = bits_against_kl({"text": "t", "results": rows}, "b")
    assert [x for x, _, _ in bars(drawn[1])[0]] == [2.5, 2.5]
    assert "side by side" not in plot.caption


@pytest.mark.parametrize(
    "longest", ["kivi (no windows)", "allocated0.75+centre+read/balanced0.5+centre+read+search (no windows)"]
)
def test_a_legend_lies_inside_its_picture(drawn, longest):
    rows = [entry(name, 0.1, None) for name in ("naive", "auto", "fp8", "oscar", longest)]
    bits_against_kl({"text": "t", "results": rows}, "b")
    figure = drawn[0].figure
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    width, height = figure.get_size_inches() * figure.dpi
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height
    assert drawn[0].get_window_extent().height > 0.55 * 3.5 * figure.dpi  # what is left for the plot itself


MARKS = st.lists(st.tuples(st.floats(2, 16), st.floats(0, 1), st.floats(0.01, 0.5)), min_size=1, max_size=12)


@given(MARKS, st.floats(0.001, 1))
def test_marks_that_would_touch_are_drawn_beside_each_other(marks, step):
    x, spans = [m[0] for m in marks], [(m[1], m[1] + m[2]) for m in marks]
    found = beside(x, spans, step)
    assert sum(found) == pytest.approx(sum(x))

    def touch(at, i, j):
        return abs(at[i] - at[j]) < step * (1 - 1e-6) - 1e-9 and max(spans[i][0], spans[j][0]) < min(spans[i][1], spans[j][1])

    pairs = list(itertools.combinations(range(len(x)), 2))
    hidden = [(i, j) for i, j in pairs if touch(x, i, j)]
    assert not [pair for pair in hidden if touch(found, *pair)]
    for i, j in hidden:
        assert (found[i] <= found[j]) == (x[i] <= x[j])
    for i, place in enumerate(found):  # what hides nothing stays where it is
        if not [pair for pair in pairs if i in pair and abs(x[pair[0]] - x[pair[1]]) < step]:
            assert place == x[i]


def test_the_front_and_the_looks():
    points = [(2, 5), (1, 9), (3, 5), (2, 4), (4, 1)]
    assert [points[i] for i in pareto(points)] == [(1, 9), (2, 4), (4, 1)]
    found = looks(["dense", "a", "b", "a (no windows)"])
    assert found["a"]["color"] == found["a (no windows)"]["color"] != found["b"]["color"]
    assert found["a"]["marker"] != found["b"]["marker"]
    assert found["a (no windows)"]["markerfacecolor"] == "white"


def test_what_is_missing_is_said_before_anything_slow(monkeypatch):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None if name == "jinja2" else name)
    with pytest.raises(InputError, match=r"--html needs jinja2: pip install 'oscar-kv\[report\]'"):
        report.require()


# -- overlap with the calibration ----------------------------------------------------------------------------------

PARAGRAPHS = [f"This is paragraph {i}, long enough to count among the paragraphs of a text." for i in range(6)]


def test_an_overlap_is_refused_or_told():
    made = Text("made.txt", "\n\n".join(PARAGRAPHS[:3]))
    provenance = {"text": "made.txt", "text_sha256": made.sha256, "paragraphs": Paragraphs.of(made).to_dict()}
    fair = Text("fair.txt", "\n\n".join(PARAGRAPHS[3:]))
    record, warnings = check_overlap(fair, provenance)
    assert (record["paragraphs"], record["shared"], warnings) == (3, {"made.txt": 0}, [])
    assert re.fullmatch("[0-9a-f]{64}", record["paragraphs_sha256"])
    unfair = Text("unfair.txt", "\n\n".join(PARAGRAPHS[2:]))
    with pytest.raises(InputError, match=r"1 of the 4 paragraphs of unfair\.txt are also in made\.txt.*--allow-overlap"):
        check_overlap(unfair, provenance)
    record, warnings = check_overlap(unfair, provenance, allow=True)
    assert record["shared"] == {"made.txt": 1}
    assert "not a fair figure" in warnings[0]


def test_an_artifact_without_a_record_is_checked_as_far_as_it_can_be():
    from oscar_kv.calibration import corpus

    text = corpus.builtin_text("calibration")
    assert set(
        calibration_paragraphs({"text": text.name, "text_sha256": text.sha256, "fidelity_text": "builtin:selection"})
    ) == {
        "builtin:calibration",
        "builtin:selection",
    }
    assert calibration_paragraphs({"text": text.name, "text_sha256": "another release of Python"}) == {}
    other = Text("a", PARAGRAPHS[0])
    _, warnings = check_overlap(other, {"text": "b", "text_sha256": "c"})
    assert "would not show" in warnings[0]
    with pytest.raises(InputError, match="is the text of the calibration itself"):
        check_overlap(other, {"text": "b", "text_sha256": other.sha256})
