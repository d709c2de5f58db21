import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from fusejax import profile, rates
from fusejax.errors import UsageError
from fusejax.profile import Curve, EmitterSpeed, Launches, MatmulTime, OpCost, Point, Profile


def curve(*points, fixed_us=2.0, bytes_per_s=4e12):
    return Curve(tuple(Point(size, us, us, us) for size, us in points), fixed_us, bytes_per_s)


def speed(kind, dtype, width):
    return EmitterSpeed(kind, kind.split("_")[0], dtype, width, 4_000_000, 2.0, 1.9, 2.1)


@pytest.fixture
def made():
    """A card that was never measured: for tests only."""
    return Profile(
        card="Test Card 1",
        jax="0.11.2",
        jaxlib="0.11.2",
        cuda="13.0.0",
        driver=None,
        date="2026-11-30T00:00:00+00:00",
        command="python scripts/calibrate.py",
        l2_bytes=60 << 20,
        memory={"copy": curve((1000, 3.0), (3000, 5.0), (9000, 20.0))},
        l2={},
        emitters=(
            speed("triton", "bf16", 1024),
            speed("triton", "bf16", 16384),
            speed("triton", "f32", 1024),
            speed("reduction_columns", "bf16", 8192),
        ),
        arithmetic=(OpCost("tanh", "f32", 0.5, 8, 70.0, 24, 200.0),),
        matmuls=(MatmulTime(1000, 2000, 3000, "bf16", 20.0, 19.0, 21.0),),
        launches=Launches(0.7, 0.3, 3.0, 3.1, 250.0, 45.0, 2.2, 1.4),
        left_out=("erf:f32: it was folded",),
    )


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Folders of the user's and of the shipped profiles, both empty."""
    own, shipped = tmp_path / "own", tmp_path / "shipped"
    own.mkdir()
    shipped.mkdir()
    monkeypatch.setenv("FUSEJAX_PROFILE_DIR", str(own))
    monkeypatch.setattr(profile, "_SHIPPED", shipped)
    return own, shipped


def test_survives_json(made):
    text = json.dumps(made.to_json(), allow_nan=False)
    assert profile.from_json(json.loads(text), "x") == made
    assert json.loads(text)["schema"] == "fusejax.profile/1"


def test_later_versions_may_add_keys(made):
    assert profile.from_json({**made.to_json(), "new": [1]}, "x") == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("launches"), r"profile\.launches is missing"),
        (lambda d: d["launches"].update(launch_us="fast"), r"launch_us is no number"),
        (lambda d: d["launches"].update(launch_us=-1.0), r"launch_us is no number from 0"),
        (lambda d: d["launches"].update(launch_us=float("nan")), r"launch_us is no number"),
        (lambda d: d["launches"].update(launch_us=True), r"launch_us is no number"),
        (lambda d: d["emitters"][1].update(width=1.5), r"emitters\[1\]\.width is no count"),
        (lambda d: d.update(memory=[]), r"profile\.memory is no object"),
        (lambda d: d["memory"]["copy"].update(points="1"), r"copy\.points is no list"),
        (lambda d: d.update(card=7), r"profile\.card is no text"),
    ],
)
def test_damage_is_named(made, change, message):
    document = json.loads(json.dumps(made.to_json()))
    change(document)
    with pytest.raises(UsageError, match=message) as caught:
        profile.from_json(document, "card.json")
    assert "card.json is a damaged profile" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("document", [None, [], {}, {"schema": "fusejax.profile/2"}])
def test_other_documents_are_refused(document):
    with pytest.raises(UsageError, match=r"card\.json is no profile"):
        profile.from_json(document, "card.json")


def test_unknown_cards_have_none(folders):
    assert profile.load("Test Card 1") is None


def test_the_users_own_goes_first(made, folders):
    own, shipped = folders
    (shipped / "test_card_1.json").write_text(json.dumps(made.to_json()))
    assert profile.load("Test Card 1") == made
    assert profile.load("Test Card 2") is None
    mine = dataclasses.replace(made, date="2026-12-01T00:00:00+00:00")
    (own / "test_card_1.json").write_text(json.dumps(mine.to_json()))
    assert profile.load("Test Card 1") == mine


@pytest.mark.parametrize(
    ("text", "message"), [("{", "it is not JSON"), ('{"schema": 1}', "no profile of a card")]
)
def test_a_damaged_file_is_told(folders, text, message):
    own, _ = folders
    (own / "test_card_1.json").write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        profile.load("Test Card 1")
    assert str(own) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_the_users_own_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FUSEJAX_PROFILE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert profile.user_file("NVIDIA H200") == (
        tmp_path / ".cache" / "fusejax" / "profiles" / "nvidia_h200.json"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert profile.user_file("NVIDIA H200").is_relative_to(tmp_path / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert profile.user_file("NVIDIA H200").is_relative_to(tmp_path / "cache" / "fusejax")
    monkeypatch.setenv("FUSEJAX_PROFILE_DIR", str(tmp_path / "mine"))
    assert profile.user_file("NVIDIA H200") == tmp_path / "mine" / "nvidia_h200.json"


@pytest.mark.parametrize(
    ("card", "name"),
    [("NVIDIA H200", "nvidia_h200"), ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb")],
)
def test_names_of_files(card, name):
    assert profile.slug(card) == name


@pytest.mark.parametrize(
    ("nbytes", "us"),
    [
        (1000, 3.0),
        (9000, 20.0),
        (2000, 4.0),
        (6000, 12.5),
        (0, 2.0),  # outside, the fitted line
        (400, 2.0001),
        (4_000_000, 3.0),
    ],
)
def test_time_for_bytes(made, nbytes, us):
    assert made.memory["copy"].us(nbytes) == pytest.approx(us)


def test_rates(made):
    assert made.emitters[0].bytes_per_s == pytest.approx(2e12)
    assert made.matmuls[0].flop_per_s == pytest.approx(6e14)
    assert made.op_ps("tanh", "f32") == 0.5
    assert made.op_ps("tanh", "bf16") is None


@pytest.mark.parametrize(
    ("kind", "dtype", "width", "found"),
    [
        ("triton", "bf16", 1, ("bf16", 1024)),
        ("triton", "bf16", 4000, ("bf16", 1024)),  # by ratio: 3.9 against 4.1
        ("triton", "bf16", 4200, ("bf16", 16384)),
        ("triton", "f16", 16384, ("bf16", 16384)),  # as many bits
        ("triton", "f32", 16384, ("f32", 1024)),
        ("triton", "s8", 1024, None),
        ("loop", "bf16", 1024, None),
    ],
)
def test_nearest_width(made, kind, dtype, width, found):
    nearest = made.emitter_speed(kind, dtype, width)
    assert (nearest and (nearest.dtype, nearest.width)) == found


def test_loading_is_light():
    code = "import sys, fusejax.profile as p; p.load('x'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def shipped():
    return json.loads(
        (pathlib.Path(profile.__file__).parent / "profiles/nvidia_h200.json").read_text()
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["memory"]["triad"].update(points=[]), "'triad' has no points"),
        (lambda d: d["memory"]["copy"].update(bytes_per_s=0), "bytes_per_s is no number above 0"),
        (lambda d: d["emitters"][0].update(us=0), "us is no number above 0"),
        (lambda d: d["emitters"][0].update(width=0), "width is no count above 0"),
        (lambda d: d["matmuls"][0].update(m=0), "m is no count above 0"),
    ],
)
def test_a_profile_that_predictions_could_not_use_is_refused(change, said):
    document = shipped()
    profile.from_json(document, "it")
    change(document)
    with pytest.raises(UsageError, match=said):
        profile.from_json(document, "it")


def test_a_profile_of_another_card_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEJAX_PROFILE_DIR", str(tmp_path))
    document = shipped() | {"card": "NVIDIA A100"}
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="is the profile of 'NVIDIA A100'"):
        profile.load("NVIDIA H200")
    document = shipped()
    del document["memory"]["driver_copy"]
    (tmp_path / "nvidia_h200.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match="has no driver_copy"):
        rates._usable("NVIDIA H200")
