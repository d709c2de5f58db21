"""A function of the user's own by name, and shapes of its arguments as text.

load("my_model:block")  # or "my_model.py:block", "my_model:model.apply"
read_arguments("f16[8192,8192], {'w': f32[8]}, 3")
"""

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from fusejax.errors import UsageError, first_line

_RIGHT = "give MODULE:NAME, such as my_model:block or my_model.py:block"
_DTYPES = {
    "pred": np.bool_,
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{
        f"{kind}{bits}": getattr(ml_dtypes, f"{kind_name}{bits}")
        for kind, kind_name in (("s", "int"), ("u", "uint"))
        for bits in (2, 4)
    },
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "f8e5m2": ml_dtypes.float8_e5m2,
    "c64": np.complex64,
    "c128": np.complex128,
}
_EXAMPLE = "such as 'f16[8192,8192], f32[], {\"w\": bf16[8,8]}'"
_SCALAR = re.compile(r"(?<=\w)\[\s*\]")
_PACKAGE = pathlib.Path(__file__).parent
_INSTALLED = tuple(
    pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")
)


def load(name: str) -> Callable[..., Any]:
    """The function that "module:name" names; modules are looked for as `python -m` does.

    Raises:
      UsageError: the text has another form, the module cannot be imported, or it has no function of
        that name.
    """
    module_name, colon, attribute = name.rpartition(":")
    if not colon or not module_name or not attribute:
        raise UsageError(f"--fn {name!r} is not a function's name: {_RIGHT}")
    found: Any = _module(name, module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            owner = getattr(found, "__name__", part)
            raise UsageError(f"--fn {name!r}: {owner} has no {part!r}: {_near(part, found)}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"--fn {name!r} is of type {type(found).__name__}, which cannot be called: give a "
            "function"
        )
    return found


def _module(name: str, module_name: str) -> Any:
    here = str(pathlib.Path.cwd())
    if sys.path[0] != here:
        sys.path.insert(0, here)
    is_file = module_name.endswith(".py")
    path = pathlib.Path(module_name)
    if is_file and not path.is_file():
        raise UsageError(f"--fn {name!r}: there is no file {module_name!r}: {_RIGHT}")
    with _importing(name, path.stem if is_file else module_name):
        if not is_file:
            return importlib.import_module(module_name)
        sys.path.insert(0, str(path.resolve().parent))  # its neighbours, as for a script
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module


@contextlib.contextmanager
def _importing(name: str, module_name: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"--fn {name!r}: there is no module {missing!r} in {pathlib.Path.cwd()} or among "
                f"what is installed: {_RIGHT}"
            ) from error
        if isinstance(error, SystemExit):
            said = f"the module ends the process (exit {error.code})"
        else:
            said = f"{type(error).__name__}: {first_line(error)}"
        raise UsageError(
            f"--fn {name!r}: importing {module_name} fails{_at(error)}: {said}"
        ) from error


def _near(part: str, owner: Any) -> str:
    there = [
        name
        for name in dir(owner)
        if not name.startswith("_")
        and callable(value := getattr(owner, name, None))
        and getattr(value, "__module__", "") == getattr(owner, "__name__", None)
    ]
    near = difflib.get_close_matches(part, dir(owner), n=3) or there[:8]
    return f"give one of {', '.join(near)}" if near else "it has no functions of its own"


def check_call(name: str, function: Callable[..., Any], text: str, arguments: tuple) -> None:
    """Traces the function once, to see that it takes the arguments.

    Args:
      name: what `load` found the function by.
      text: what `read_arguments` read the arguments from.

    Raises:
      UsageError: it does not take so many, or tracing it fails: with the first line of what was
        raised, and the last line of the user's own in it.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is not written in Python
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise UsageError(
                f"--args {text!r} does not fit {name.rpartition(':')[2]}{signature}: {error}"
            ) from error
    leaves, tree = jax.tree.flatten(arguments)
    arrays = [leaf for leaf in leaves if is_array(leaf)]

    def call(*given: Any) -> Any:
        turn = iter(given)
        filled = [next(turn) if is_array(leaf) else leaf for leaf in leaves]
        return function(*jax.tree.unflatten(tree, filled))

    try:
        jax.eval_shape(call, *arrays)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--fn {name!r} cannot be traced with --args {text!r}{_at(error)}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def is_array(leaf: Any) -> bool:
    """Whether an argument is an array or the shape of one; what else there is stays as it is."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _at(error: BaseException) -> str:
    """Where in the user's own code it happened: " (model.py:12)", or nothing."""
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    for frame in traceback.extract_tb(error.__traceback__):
        file = pathlib.Path(frame.filename)
        if file.is_absolute() and not any(map(file.is_relative_to, (_PACKAGE, *_INSTALLED))):
            place = f"{frame.filename}:{frame.lineno}"
    with contextlib.suppress(ValueError):
        place = str(pathlib.Path(place).relative_to(pathlib.Path.cwd()))
    return f" ({place})" if place else ""


def read_arguments(text: str) -> tuple[Any, ...]:
    """Arguments from text: "f16[8192,8192], f32[]" are two arrays, the second a scalar.

    dtypes go by HLO's names (f16, bf16, f32, s32, u8, pred, ...) or JAX's (float16, ...). Tuples,
    lists and dicts of arrays are written as in Python, [{"w": f32[8,8]}] * 12 too; numbers, True,
    False, None and strings are the values themselves.

    Raises:
      UsageError: the text is nothing of the kind.
    """
    try:
        # An empty index is none of Python's.
        whole = _SCALAR.sub("[()]", text.strip().removesuffix(","))
        tree = ast.parse(f"({whole},)" if whole else "()", mode="eval")
    except (SyntaxError, ValueError) as error:
        said = getattr(error, "msg", str(error)).partition(" on line ")[0]
        raise UsageError(
            f"--args {text!r} cannot be read ({said}): give dtype[sizes] for every argument, "
            f"{_EXAMPLE}"
        ) from error
    return tuple(_value(node, text) for node in tree.body.elts)  # type: ignore[attr-defined]


def _value(node: ast.AST, text: str) -> Any:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return _array(node.value.id, node.slice, text)
    if isinstance(node, ast.Dict) and None not in node.keys:
        keys = [getattr(key, "value", None) for key in node.keys]
        # JAX sorts the keys.
        if len({type(key) for key in keys}) < 2 and all(isinstance(k, str | int) for k in keys):
            return {key: _value(one, text) for key, one in zip(keys, node.values, strict=True)}
    if isinstance(node, ast.List | ast.Tuple):
        kind = list if isinstance(node, ast.List) else tuple
        return kind(_value(one, text) for one in node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        many, times = _value(node.left, text), _value(node.right, text)
        if isinstance(many, list | tuple) and isinstance(times, int):
            return many * times
    with contextlib.suppress(ValueError):
        return ast.literal_eval(node)
    said = ast.unparse(node)
    raise UsageError(
        f"--args {text!r}: {said!r} is no argument: give dtype[sizes], f32[] for a scalar, or a "
        f"tuple, list or dict of them, {_EXAMPLE}"
    )


def _array(name: str, sizes: ast.AST, text: str) -> jax.ShapeDtypeStruct:
    nodes = sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]
    shape = [node.value if isinstance(node, ast.Constant) else None for node in nodes]
    if not all(type(size) is int for size in shape):
        raise UsageError(
            f"--args {text!r}: the sizes of {name}[{ast.unparse(sizes)}] are not whole numbers: "
            f"give dtype[sizes], {_EXAMPLE}"
        )
    try:
        dtype = np.dtype(_DTYPES.get(name) or jnp.dtype(name))
        if name not in _DTYPES and dtype.name != name:  # "u4" is 4 bits here, and 4 bytes to NumPy
            raise TypeError(name)
    except TypeError as error:
        raise UsageError(
            f"--args {text!r}: {name!r} is no dtype: give one of {', '.join(_DTYPES)}, or a name "
            "of JAX's"
        ) from error
    if dtype.itemsize == 8 and dtype.kind in "iuf" and not jax.config.jax_enable_x64:
        raise UsageError(
            f"--args {text!r}: JAX makes {name} a 32-bit dtype: set JAX_ENABLE_X64=1, or give "
            f"{name.replace('64', '32')}"
        )
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
