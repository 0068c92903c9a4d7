"""The legend of dimension letters and the names array types go by.

`B` rows, `T` query tokens, `S` key tokens, `D` model width, `N` query heads, `K` key/value heads, `H` head width,
`Hv` width of a value where it is another, `R` latent width, `F` mlp width, `E` experts, `V` vocabulary,
`P` SSM state, `C` chunk, `M` microbatches, `L` layers; never reused.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jax import Array

__all__ = ["Array", "Bool", "Float", "Int", "Key", "Num", "PyTree", "Shaped"]

PyTree = Any
"""Any tree of arrays that `jax.tree` walks."""

if TYPE_CHECKING:
    # A type checker reads Float[Array, "B T D"] as Annotated[Array, "B T D"]: an array with a note.
    from typing import Annotated as Bool
    from typing import Annotated as Float
    from typing import Annotated as Int
    from typing import Annotated as Key
    from typing import Annotated as Num
    from typing import Annotated as Shaped
elif importlib.util.find_spec("jaxtyping") is not None:
    # Shapes are checked in tests only, where jaxtyping is installed.
    _types = importlib.import_module("jaxtyping")
    Bool, Float, Int, Key, Num, Shaped = (
        getattr(_types, name) for name in ("Bool", "Float", "Int", "Key", "Num", "Shaped")
    )
else:

    class _Annotation:
        """Stand in for a jaxtyping type where jaxtyping is not installed."""

        def __class_getitem__(cls, item: Any) -> type:
            return cls

    Bool = Float = Int = Key = Num = Shaped = _Annotation
