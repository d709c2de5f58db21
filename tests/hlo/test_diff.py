"""Two modules side by side."""

from fusejax.hlo.analyse import analyse
from fusejax.hlo.diff import compare, diff_json
from fusejax.program import Program

META = (
    'metadata={{op_name="jit(f)/{scope}/op" source_file="/{folder}/model.py" source_line={line}}}'
)


def module(*kernels, folder="a", dtype="f32", name="m"):
    """A chain of unary kernels, each given as (name, scope, line)."""
    lines, previous = [], "x"
    for kernel, scope, line in kernels:
        meta = META.format(scope=scope, folder=folder, line=line)
        lines.append(f"  {kernel} = {dtype}[4096] negate({previous}), {meta}")
        previous = kernel
    text = (
        f"HloModule {name}, is_scheduled=true\nENTRY e {{\n  x = {dtype}[4096] parameter(0)\n"
        + "\n".join(lines)
        + f"\n  ROOT t = ({dtype}[4096]) tuple({previous})\n}}"
    )
    return analyse(Program(name, text))


def names(things):
    return [thing.name for thing in things]


def test_names_and_folders_do_not_matter():
    a = module(("loop_fusion.3", "mlp", 7), ("fusion.9", "norm", 8))
    b = module(("wrapped_negate", "mlp", 7), ("other", "norm", 8), folder="b/c")
    (found,) = compare([a], [b])
    assert found.is_empty
    assert [(x.name, y.name) for x, y in found.kernels.pairs] == [
        ("loop_fusion.3", "wrapped_negate"), ("fusion.9", "other"),
    ]  # fmt: skip


def test_what_appeared_went_and_changed():
    a = module(("p", "mlp", 7), ("q", "norm", 8), ("gone", "old", 9))
    b = module(("p2", "mlp", 70), ("new", "fresh", 71), ("q2", "norm", 80), dtype="f64")
    (found,) = compare([a], [b])
    assert names(found.kernels.appeared) == ["new"]
    assert names(found.kernels.went) == ["gone"]
    document = diff_json([found])["modules"][0]
    assert document["launches"] == {"a": 3, "b": 3}
    changed = [(c["a"], c["b"], c["bytes"]) for c in document["kernels"]["changed"]]
    assert changed == [("p", "p2", {"a": 32768, "b": 65536}), ("q", "q2", {"a": 32768, "b": 65536})]
    assert [b["scopes"] for b in document["boundaries"]["appeared"]] == [
        ["mlp", "fresh"], ["fresh", "norm"],
    ]  # fmt: skip
    assert len(document["boundaries"]["went"]) == 2


def test_a_lost_launch_of_several_alike():
    a = module(("k1", "mlp", 7), ("k2", "mlp", 7), ("k3", "mlp", 7))
    b = module(("k1", "mlp", 7), ("k2", "mlp", 7))
    (found,) = compare([a], [b])
    assert names(found.kernels.went) == ["k3"]
    assert len(found.boundaries.went) == 1


def test_modules_are_paired_by_name():
    a = [module(("k", "s", 1), name="jit_f"), module(("k", "s", 1), name="jit_g")]
    b = [module(("k", "s", 1), name="jit_g"), module(("k", "s", 1), name="jit_h")]
    pairs = [(d.a and d.a.name, d.b and d.b.name) for d in compare(a, b)]
    assert pairs == [("jit_g", "jit_g"), ("jit_f", None), (None, "jit_h")]
    assert diff_json(compare(a, b))["modules"][2]["launches"] == {"a": None, "b": 1}
