"""Triton 3.6's interpreter without most of its own work: it takes a third of the time, and kernels compute the same.

What is left out:

- Checks of overflow whose results nobody reads. Each addition, subtraction and product of integers is computed twice more
  for a check that the interpreter then skips, as its options say `debug=False`.
- Names, shapes and dtypes of values that are made anew for each value. Few different ones exist, so each is made once.
- Triton's functions replaced by the interpreter's own in each call of a function that a kernel calls. Once in a launch is enough.

It also reads the bounds of a loop in a way that NumPy from 2.4 on refuses; they are read here as it means to.
"""

from __future__ import annotations

from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


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
    blocks: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    block_shapes: dict[tuple[int, ...], core.tuple] = {}
    shapes: dict[tuple[int, ...], tuple[core.constexpr, core.tuple]] = {}

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
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            tensor_init(self, handle, type)
            shapes[sizes] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    def equal(self: Any, other: Any) -> Any:
        return core.constexpr(True) if other is self else tuples_equal(self, other)

    core.block_type.__init__, core.tensor.__init__, core.tuple.__eq__ = init_block, init_tensor, equal


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


def install() -> None:
    """For the rest of the process."""
    assert not interpreter.InterpreterOptions.debug  # else somebody reads the checks of overflow
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    _cache_np_dtypes()
    _cache_shapes()
    _patch_once_a_launch()
    _read_loop_bounds()
