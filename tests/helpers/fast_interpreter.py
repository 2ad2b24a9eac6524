"""Triton 3.6's interpreter without most of its own work: it takes a fifth of the time, and kernels compute the same.

What is left out:

- Checks of overflow whose results nobody reads. Each addition, subtraction and product of integers is computed twice more
  for a check that the interpreter then skips, as its options say `debug=False`.
- Names, shapes, dtypes and constants that are made anew for each value. Few different ones exist, so each is made once.
- The search for what an operator does with two operands of these types. It is made once for each pair of types, by the
  interpreter itself, and so are its errors. The answer is kept. So is how a value of one type becomes one of another.
- Operands spread to the shape of an operator's result. NumPy spreads them while it computes.
- Triton's functions replaced by the interpreter's own in each call of a function that a kernel calls. Once in a launch is enough.

It also reads the bounds of a loop in a way that NumPy from 2.4 on refuses; they are read here as it means to.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "minimum", "maximum"),
    *("and_", "or_", "xor_", "shl", "lshr", "ashr"),
    *("less_than", "less_equal", "greater_than", "greater_equal", "equal", "not_equal"),
)

_BY_SYMBOL = {  # a method of tensors: the operator, and what it gets beside the operands
    "__add__": ("add", (True,)),
    "__sub__": ("sub", (True,)),
    "__mul__": ("mul", (True,)),
    "__and__": ("and_", ()),
    "__lt__": ("less_than", ()),
    "__ge__": ("greater_equal", ()),
}
FOUND: dict[str, dict[tuple[Any, ...], tuple[Any, ...] | None]] = {name: {} for name in OPERATORS}
"""What an operator does with operands of these types, None where the interpreter does it each time."""

CASTS: dict[tuple[str, str], tuple[Any, ...] | None] = {}
"""How a value of one type becomes one of another: nothing is done, a call, or None where the interpreter does it each time."""


def _cache_np_dtypes() -> None:
    original, known = interpreter._get_np_dtype, {}

    def get(tt_dtype: Any) -> Any:
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = original(tt_dtype)
        return found

    interpreter._get_np_dtype = get


def _cache_shapes() -> None:
    block_init, tensor_init, tuples_equal = core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__
    with_element_ty = core.block_type.with_element_ty
    blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    block_shapes: dict[tuple[int, ...], core.tuple] = {}
    shapes: dict[str, tuple[core.constexpr, core.tuple]] = {}
    same_shape: dict[tuple[str, str], Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = blocks.get((element_ty.name, *sizes))
        if known is None:
            block_init(self, element_ty, shape)
            self.shape = block_shapes.setdefault(sizes, self.shape)
            blocks[element_ty.name, *sizes] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = known

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = shapes.get(type.name)
        if known is None:
            tensor_init(self, handle, type)
            shapes[type.name] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    def with_elements(self: Any, scalar_ty: Any) -> Any:
        known = same_shape.get((self.name, scalar_ty.name))
        if known is None:
            known = same_shape[self.name, scalar_ty.name] = with_element_ty(self, scalar_ty)
        return known

    def equal(self: Any, other: Any) -> Any:
        return core.constexpr(True) if other is self else tuples_equal(self, other)

    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = init_block, init_tensor, equal
    core.block_type.with_element_ty = with_elements


def _look_at_few_values() -> None:
    """Most values are what is looked for, or no constant at all."""
    unwrap, dtypes_equal, to_tensor = core._unwrap_if_constexpr, core.dtype.__eq__, TritonSemantic.to_tensor
    wrapped = (core.constexpr, list, tuple, core.tuple)

    core._unwrap_if_constexpr = lambda value: unwrap(value) if isinstance(value, wrapped) else value
    core.dtype.__eq__ = lambda self, other: other is self or dtypes_equal(self, other)
    TritonSemantic.to_tensor = lambda self, x, *rest: x if type(x) is core.tensor else to_tensor(self, x, *rest)


def _make_handles_quickly() -> None:
    handle, most = interpreter.TensorHandle, dict[str, int]()  # how many bytes an element of a dtype has at most
    post_init = handle.__post_init__

    def fits(data: Any, dtype: Any) -> bool:
        size = most.get(dtype.name)
        if size is None:
            size = 8 if isinstance(dtype, core.pointer_type) else max(1, dtype.primitive_bitwidth // 8)
            most[dtype.name] = size
        return data.itemsize <= size

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not fits(data, dtype):
            post_init(self)

    def get_element_ty(self: Any) -> Any:
        dtype = self.dtype
        while (inner := getattr(dtype, "element_ty", None)) is not None:
            dtype = inner
        return dtype

    handle.__init__, handle.get_element_ty, interpreter._validate_np_data_size = init, get_element_ty, fits


def _make_constants_once() -> None:
    original, known = TritonSemantic.scalar_constant, dict[tuple[Any, ...], Any]()

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name  # 0.0 and -0.0 are the same constant: the interpreter makes 0 of both
        found = known.get(key)
        if found is None:
            found = known[key] = original(self, value, dtype)
        return found

    TritonSemantic.scalar_constant = scalar_constant


def _spread_quickly() -> None:
    """NumPy's own functions look at their arguments for longer than they work."""
    original, builder = TritonSemantic.broadcast_impl_value, interpreter.InterpreterBuilder

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block() == right.is_block() and (not left.is_block() or left.shape is right.shape):
            return lhs, rhs
        return original(self, lhs, rhs)

    def filled(data: Any, shape: Any, dtype: Any) -> Any:
        out = np.empty(tuple(shape), data.dtype)
        out[...] = data
        return interpreter.TensorHandle(out, dtype.scalar)

    def expand_dims(self: Any, arg: Any, axis: int) -> Any:
        shape = list(arg.data.shape)
        shape.insert(axis if axis >= 0 else axis + len(shape) + 1, 1)
        return interpreter.TensorHandle(arg.data.reshape(shape), arg.dtype.scalar)

    TritonSemantic.broadcast_impl_value = broadcast
    builder.create_broadcast = lambda self, arg, shape: filled(arg.data, shape, arg.dtype)
    builder.create_splat = lambda self, ret_ty, arg: filled(arg.data, ret_ty.shape, arg.dtype)
    builder.create_expand_dims = expand_dims


class _Watched:
    """A builder that notes by what it made a value, and of what."""

    def __init__(self, builder: Any) -> None:
        self.builder, self.made = builder, dict[int, tuple[str, tuple[Any, ...], Any]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.builder, name)
        if not name.startswith("create_"):
            return found

        def create(*args: Any) -> Any:
            value = found(*args)
            self.made[id(value)] = name, args, value  # kept, as an id is free again with its value
            return value

        return create


def _find_once_what_is_done(name: str) -> None:
    """By an operator. What it does follows from its operands' types: they become of one type, and the builder gets both.

    Where more is done, the interpreter does it each time.
    """
    original, known = getattr(TritonSemantic, name), FOUND[name]

    def observe(self: Any, lhs: Any, rhs: Any, rest: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...] | None]:
        pairs, find_types = list[tuple[Any, Any]](), TritonSemantic.binary_op_type_checking_impl

        def noted(*args: Any, **named: Any) -> tuple[Any, Any]:
            pairs.append(find_types(*args, **named))
            return pairs[-1]

        watched = _Watched(self.builder)
        with patch.object(TritonSemantic, "binary_op_type_checking_impl", noted):
            result = original(TritonSemantic(watched), lhs, rhs, *rest)
        (left, right), (made, operands, _) = pairs[-1], watched.made.get(id(result.handle), ("", (), None))
        if len(pairs) > 1 or [id(one) for one in operands] != [id(left.handle), id(right.handle)]:
            return result, None
        constant = None if type(rhs) is core.tensor else right.handle
        return result, (left.dtype, right.dtype, constant, getattr(interpreter.InterpreterBuilder, made), result.type)

    def operator(self: Any, lhs: Any, rhs: Any, *rest: Any, **named: Any) -> Any:
        if type(lhs) is not core.tensor or named:
            return original(self, lhs, rhs, *rest, **named)
        if type(rhs) is core.tensor:
            key = lhs.type.name, rhs.type.name, rest
        elif type(rhs) is int or type(rhs) is float:
            key = lhs.type.name, type(rhs), rhs, rest
        else:
            return original(self, lhs, rhs, *rest)
        if key not in known:
            result, known[key] = observe(self, lhs, rhs, rest)
            return result
        if (found := known[key]) is None:
            return original(self, lhs, rhs, *rest)
        left, right, constant, create, result_type = found
        if lhs.dtype.name != left.name:
            lhs = self.cast(lhs, left)
        if constant is None:
            if rhs.dtype.name != right.name:
                rhs = self.cast(rhs, right)
            constant = rhs.handle
        return core.tensor(create(self.builder, lhs.handle, constant), result_type)

    setattr(TritonSemantic, name, operator)


def _find_once_what_is_cast() -> None:
    """A cast follows from both types. Most are one call of the builder, with the value and what is the same for all such casts."""
    original, known = TritonSemantic.cast, CASTS

    def observe(self: Any, value: Any, dtype: Any) -> tuple[Any, tuple[Any, ...] | None]:
        watched = _Watched(self.builder)
        result = original(TritonSemantic(watched), value, dtype)
        if result is value:
            return result, ()
        made, (operand, *rest), _ = watched.made.get(id(result.handle), ("", (None,), None))
        if operand is not value.handle or any(isinstance(one, interpreter.TensorHandle) for one in rest):
            return result, None
        return result, (getattr(interpreter.InterpreterBuilder, made), rest, result.type)

    def cast(self: Any, value: Any, dtype: Any, rounding: str | None = None) -> Any:
        if rounding is not None or type(value) is not core.tensor:
            return original(self, value, dtype, rounding)
        key = value.type.name, dtype.scalar.name
        if key not in known:
            result, known[key] = observe(self, value, dtype)
            return result
        if (found := known[key]) is None:
            return original(self, value, dtype)
        if not found:
            return value
        create, rest, result_type = found
        return core.tensor(create(self.builder, value.handle, *rest), result_type)

    TritonSemantic.cast = cast


def _call_builtins_directly() -> None:
    """Without a look at whether a semantic is given, as the interpreter gives it each time."""
    looks = core.load.__code__
    semantics: dict[int, TritonSemantic] = {}
    members: dict[int, list[tuple[str, Any]]] = {}

    def caller(obj: Any, name: str, member: Any, semantic: Any) -> Callable[..., Any]:
        if obj is core.tensor and name in _BY_SYMBOL:
            operator, rest = _BY_SYMBOL[name]
            do = getattr(TritonSemantic, operator)
            constant = core.constexpr

            def apply(self: Any, other: Any) -> Any:
                return do(semantic, self, other.value if type(other) is constant else other, *rest)

            return apply
        fn = member.__wrapped__ if member.__code__ is looks else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return fn(*args, **kwargs)

        return call

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        semantic = semantics.setdefault(id(builder), TritonSemantic(builder))
        if id(pkg) not in members:
            found = [(name, member) for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]
            members[id(pkg)] = [(name, caller(pkg, name, member, semantic)) for name, member in found]
        for name, call in members[id(pkg)]:
            scope.set_attr(pkg, name, call)

    interpreter._patch_builtin = patch_builtin


def _patch_once_a_launch() -> None:
    patch_lang = interpreter._patch_lang
    patched: set[int] = set()  # the modules whose view of Triton is replaced in this launch

    def patch(fn: Any) -> Any:
        module, is_launch = id(fn.__globals__), not patched
        if module in patched:
            return None  # only a launch uses what is returned, and it comes first
        scope = patch_lang(fn)
        patched.add(module)
        if is_launch:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def _read_loop_bounds() -> None:
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


@functools.cache
def install() -> None:
    """For the rest of the process."""
    assert not interpreter.InterpreterOptions.debug  # else somebody reads the checks of overflow
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    _cache_np_dtypes()
    _cache_shapes()
    _look_at_few_values()
    _make_handles_quickly()
    _make_constants_once()
    _spread_quickly()
    for name in OPERATORS:
        _find_once_what_is_done(name)
    _find_once_what_is_cast()
    _call_builtins_directly()
    _patch_once_a_launch()
    _read_loop_bounds()
