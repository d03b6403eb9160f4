"""The report: one page that asks for nothing from outside, says what the figures say, and keeps user text as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
import torch
from conftest import random_transform
from models import tiny_model

from oscar_kv.calibration.corpus import Text
from oscar_kv.calibration.overlap import Paragraphs, calibration_paragraphs, check_overlap
from oscar_kv.config import OscarConfig
from oscar_kv.errors import InputError
from oscar_kv.evaluate import plots, report
from oscar_kv.evaluate.baselines import build_baseline
from oscar_kv.evaluate.fidelity import evaluate
from oscar_kv.evaluate.plots import kl_bars, layer_errors, looks, pareto
from oscar_kv.geometry import model_geometry

pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'oscar-kv[report]'")
pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'oscar-kv[report]'")

VOID = {"meta", "br", "link", "img", "input", "hr"}
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
    source = report.render(results, LAYERS, "oscar eval 'my model' --html a.html")
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
    text = Page(report.render(results, LAYERS, "oscar eval 'my model' --html a.html")).text
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


def test_one_window_has_no_intervals(results):
    rows = [
        {**row, "kl_interval": None, "buckets": [{**b, "kl_interval": None} for b in row["buckets"]]}
        for row in results[0]["results"]
    ]
    one = {**results[0], "results": rows, "settings": {**results[0]["settings"], "windows": 1}}
    assert "With a single window there are no intervals" in Page(report.render([one])).text


def test_overlap_is_said_in_the_page(results):
    settings = {**results[0]["settings"], "overlap": {"shared": {"builtin:calibration": 7}}}
    page = Page(report.render([{**results[0], "settings": settings}]))
    assert "shares 7 paragraphs with builtin:calibration, which the method was made on: not a fair figure" in page.text


def test_errors_by_layer_are_drawn_where_they_are_recorded():
    assert layer_errors({"0": {"key_eigenvalues": [1.0]}}, "x") == ""
    assert layer_errors({}, "x") == ""
    label = re.search('aria-label="([^"]*)"', layer_errors(LAYERS, "x"))[1]
    assert label == "Error by layer and head, 0.01 to 0.5; most for the values of layer 1, head 1"


def test_bars_are_the_ends_of_intervals_seen_from_the_mean(monkeypatch, results):
    rows = [
        {"kl_mean": 1.0, "kl_interval": [0.75, 3.0]},
        {"kl_mean": 1.0, "kl_interval": None},
        {"kl_mean": 2.0, "kl_interval": [0.0, 5.0]},  # 0 is nowhere on a log scale
    ]
    assert kl_bars(rows) == [[0.25, 0.0, 1.8], [2.0, 0.0, 3.0]]
    drawn = []
    monkeypatch.setattr(plots, "kl_bars", lambda rows: drawn.append(len(rows)) or [[0.0] * len(rows)] * 2)
    measured = [row for row in results[0]["results"] if row["kl_mean"] > 0]
    plots.kl_by_position(results[0], "a")
    plots.bits_against_kl(results[0], "b")
    assert drawn == [len(row["buckets"]) for row in measured] + [1] * len(measured)


def test_the_front_and_the_looks():
    assert pareto([(2, 5), (1, 9), (3, 5), (2, 4), (4, 1)]) == [(1, 9), (2, 4), (4, 1)]
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
