"""Scopes out of operation names, and decisions out of the fusion pass's dump."""

import pytest

from fusejax.hlo import decisions, scopes


@pytest.mark.parametrize(
    ("op_name", "scope", "direction"),
    [
        ("jit(f)/gelu/mul", "gelu", "forward"),
        ("jit(f)/jit(main)/block/mlp/dot_general", "block/mlp", "forward"),
        ("jit(f)/jvp(loss)/exp", "loss", "forward"),
        ("jit(f)/transpose(jvp(loss))/mul", "loss", "backward"),
        ("jit(f)/transpose(jvp(block/mlp))/mul", "block/mlp", "backward"),
        ("jit(f)/vmap(part)/add", "part", "forward"),
        ("jit(f)/jvp()/block/jit(relu)/max", "block", "forward"),
        ("jit(f)/jvp(jit(take_along_axis))/gather", "", "forward"),
        ("jit(f)/while/body/closed_call/layer/checkpoint/rematted_computation/sin", "layer",
         "forward"),
        ("jit(f)/part/dot_general[dimension_numbers=(((1,), (0,)), ((), ())) a=b/c]", "part",
         "forward"),
        ("x", "", "forward"),
        ("", "", "forward"),
    ],
)  # fmt: skip
def test_scopes(op_name, scope, direction):
    assert (scopes.scope(op_name), scopes.direction(op_name)) == (scope, direction)


def test_merged_operations_are_told_apart():
    names = scopes.operations("jit(f)/a/mul;jit(f)/transpose(jvp(b))/mul")
    assert [scopes.scope(name) for name in names] == ["a", "b"]
    assert [scopes.direction(name) for name in names] == ["forward", "backward"]
    assert scopes.operations("") == []


def test_holds():
    assert scopes.holds("a/b/c", "b")
    assert scopes.holds("a/b/c", "a/b")
    assert not scopes.holds("ab", "b")


DUMP = r"""
fusion_steps { producer_ineligible { producer_name: "a" reason: "No users to fuse" } }
fusion_steps { update_priority { producer_name: "a" us_fused: 3 us_unfused: 9 } }
fusion_steps { fusion { fusion_name: "fusion" producer_name: "a" consumer_name: "b" } }
fusion_steps { fusion { fusion_name: "fusion.1" producer_name: "z" consumer_name: "fusion" } }
fusion_steps { update_priority { producer_name: "fusion.1" consumer_names: "c" us_fused: -1.5
  us_unfused: -2.5 } }
fusion_steps { producer_ineligible { producer_name: "d" reason: "the producer is not fusible" } }
hlo_module_before_fusion: "HloModule m\n\nENTRY e {\n  ROOT a.0 = f32[] constant(\"\")\n}\n"
"""


def test_the_last_event_counts_and_renames_are_followed():
    found = decisions.read(DUMP)
    reason = found.reason("b")
    assert (reason.kind, reason.us_fused, reason.us_unfused) == ("cost_model", -1.5, -2.5)
    rule = found.reason("d")
    assert rule.kind == "rule"
    assert "the producer is not fusible" in rule.text
    assert found.before is not None
    assert found.before.name == "m"


def test_a_broken_dump_is_not_fatal():
    for end in range(0, len(DUMP), 7):
        decisions.read(DUMP[:end])


@pytest.mark.parametrize("name", ["q [tokens/s]", "attn (q/k)", "x[a/b]", "{a/b}", "(q/k)"])
def test_a_slash_inside_brackets_belongs_to_the_name(name):
    assert scopes.scope(f"jit(f)/{name}/mul") == name
    assert scopes.scope(f"jit(f)/jvp({name})/mul") == name
