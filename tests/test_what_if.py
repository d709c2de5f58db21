"""What XLA's options change, and mistakes in them."""

import io

import numpy as np
import pytest
from rich.console import Console

import fusejax
from fusejax import what_if
from fusejax.compare_ops import compare_op
from fusejax.compile import targets
from fusejax.errors import UsageError
from fusejax.ops import OPS
from fusejax.report.what_if_console import print_what_if

NO_FUSION = {"xla_disable_hlo_passes": "priority-fusion"}
NO_EFFECT = {"xla_gpu_enable_triton_gemm": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["a=1"], {"a": "1"}),
        (["a=true", "b=False"], {"a": True, "b": False}),
        (["--a=1, b=x,y ,c="], {"a": "1", "b": "x,y", "c": ""}),
    ],
)
def test_options_are_read(given, expected):
    assert what_if.read_options(given) == expected


@pytest.mark.parametrize("given", [["a"], ["=1"], ["a=1", "a=2"], [""]])
def test_texts_that_are_no_options_are_told(given):
    with pytest.raises(UsageError, match="--xla-option"):
        what_if.read_options(given)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"xla_gpu_no_such": "1"}, "XLA has no option 'xla_gpu_no_such' in this version"),
        ({"xla_gpu_enable_triton_gemm": "maybe"}, "XLA takes true or false"),
        ({"xla_gpu_autotune_level": "x"}, "XLA takes a whole number"),
    ],
)
@pytest.mark.parametrize("card", ["h200", None])
def test_options_that_xla_refuses_are_told_in_one_line(option, said, card, deviceless):
    target = deviceless(card) if card else targets.cpu()
    what_if.check_options(NO_EFFECT, target)
    with pytest.raises(UsageError, match="--xla-option") as raised:
        what_if.check_options(option, target)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def found(deviceless):
    def compare(options, is_brief):
        return compare_op(
            OPS["bias_gelu"](), (512, 512), np.float16, deviceless("h200"),
            names=("xla", "pallas"), xla_options=options, is_brief=True,
        )  # fmt: skip

    return what_if.compare_options(compare, {**NO_FUSION, **NO_EFFECT})


def test_changes_are_those_of_each_option(found):
    changes = {(change.path, change.options): change for change in found.changes}
    fusion = "xla_disable_hlo_passes=priority-fusion"
    gemm = "xla_gpu_enable_triton_gemm=false"
    both = f"{fusion},{gemm}"
    assert list(dict.fromkeys(options for _, options in changes)) == [both, fusion, gemm]
    for options in (both, fusion):
        change = changes["xla", options]
        assert change.is_one
        assert (change.before.launches, change.before.boundaries) == (1, ())
        assert change.after.launches > 1
        assert change.after.traffic.total > change.before.traffic.total
        assert len(change.new_boundaries()) == len(change.after.boundaries) > 0
        assert change.gone_boundaries() == []
    assert not changes["xla", gemm].is_one
    # A kernel of ours is none of XLA's to fuse or not.
    assert not any(changes["pallas", options].is_one for options in (both, fusion, gemm))
    assert found.comparison.xla_options == {**NO_FUSION, **NO_EFFECT}


def test_changes_are_shown(found):
    file = io.StringIO()
    print_what_if(found, Console(file=file, width=100))
    text = file.getvalue()
    assert "xla_disable_hlo_passes=priority-fusion changes xla, and not pallas" in text
    assert "xla_gpu_enable_triton_gemm=false changes no path" in text
    assert "1 -> " in text
    assert text.count("xla: new boundary f16[512,512]") + text.count("f32[512,512]") > 0
    assert max(map(len, text.splitlines())) <= 100
    entries = found.to_json()
    assert len(entries) == len(found.changes)
    first = next(entry for entry in entries if entry["path"] == "xla")
    assert first["changes"] is True
    assert first["without"]["launches"] == 1 < first["with"]["launches"]
    assert first["without"]["bytes"] < first["with"]["bytes"]


def test_functions_are_compiled_with_options(deviceless):
    import jax
    import jax.numpy as jnp

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    functions = {"f": lambda x: jnp.exp(jnp.tanh(x) + 1)}
    target = deviceless("h100")
    plain = fusejax.compare(functions, x, target=target).to_json()
    split = fusejax.compare(functions, x, target=target, xla_options=NO_FUSION).to_json()
    assert plain["paths"]["f"]["launches"] == 1 < split["paths"]["f"]["launches"]
    assert (plain["xla_options"], split["xla_options"]) == ({}, NO_FUSION)
    with pytest.raises(UsageError, match="no option 'nope'"):
        fusejax.compare(functions, x, target=target, xla_options={"nope": 1})
