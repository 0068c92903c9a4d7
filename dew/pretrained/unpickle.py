"""An interpreter of the pickles that `torch.save` writes for a dict of tensors, which can express nothing more.

Entry point: `unpickle`. It resolves no name outside of `_GLOBALS` and calls nothing of Python; every other opcode and
name is refused. Opcodes: https://docs.python.org/3/library/pickletools.html.
"""

import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from dew.pretrained.source import CheckpointError


class StoredTensor(NamedTuple):
    """Where a tensor lies: storage class and key, then in elements its first one, sizes and strides."""

    storage: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    kind: str
    key: str


_MARK = object()
_TENSOR, _PARAMETER, _DICT = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
    "collections.OrderedDict",
)
_GLOBALS = {_TENSOR, _PARAMETER, _DICT}
_MAX_ELEMENT = 2**48
_MAX_NAME = 64
_MAX_STEPS = 4_000_000
"""Opcodes of one pickle: a tensor takes some forty, and an opcode of one byte may make an object of a hundred."""


def unpickle(data: bytes, where: object) -> dict[str, StoredTensor]:
    """Read the dict of tensors that a pickle describes.

    Args:
        data: The pickle.
        where: The file, for errors.

    Returns:
        Tensor name to where it lies; nothing has been checked against the file.

    Raises:
        CheckpointError: If the pickle holds anything else, or is damaged.
    """
    try:
        value = _Machine(data, where).run()
    except (IndexError, KeyError, TypeError, struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{where}: its pickle is damaged ({type(error).__name__}: {error}); fetch it again."
        ) from error
    if not isinstance(value, dict) or not value:
        raise CheckpointError(f"{where} must hold a dict of tensors. Received: {type(value).__name__}")
    wrong = [
        name for name, tensor in value.items() if not isinstance(name, str) or not isinstance(tensor, StoredTensor)
    ]
    if wrong:
        raise CheckpointError(
            f"{where} must hold tensors by name and nothing else. Received: {str(wrong[0])[:80]!r} of type "
            f"{type(value[wrong[0]]).__name__}"
        )
    return value


class _Machine:
    """The stack, the memo and one method per opcode that such pickles use."""

    def __init__(self, data: bytes, where: object):
        self.data, self.where, self.position = data, where, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        steps = self._steps()
        for _ in range(_MAX_STEPS):
            code = self._take(1)
            if code == pickle.STOP:
                return self.stack.pop()
            step = steps.get(code)
            if step is None:
                name = next((op.name for op in pickletools.opcodes if op.code == code.decode("latin-1")), repr(code))
                raise CheckpointError(f"{self.where}: its pickle uses {name}, which a dict of tensors does not need.")
            step()
        raise CheckpointError(
            f"{self.where}: its pickle has more than {_MAX_STEPS} opcodes, which no dict of tensors has."
        )

    def _steps(self) -> dict[bytes, Callable[[], None]]:
        push, number = self.stack.append, self._number
        return {
            pickle.PROTO: lambda: self._protocol(number("<B")),
            pickle.FRAME: lambda: self._skip(number("<Q")),
            pickle.MARK: lambda: push(_MARK),
            pickle.NONE: lambda: push(None),
            pickle.NEWTRUE: lambda: push(True),
            pickle.NEWFALSE: lambda: push(False),
            pickle.BININT: lambda: push(number("<i")),
            pickle.BININT1: lambda: push(number("<B")),
            pickle.BININT2: lambda: push(number("<H")),
            pickle.LONG1: lambda: push(int.from_bytes(self._take(number("<B")), "little", signed=True)),
            pickle.BINFLOAT: lambda: push(number(">d")),
            pickle.BINUNICODE: lambda: push(self._take(number("<I")).decode()),
            pickle.SHORT_BINUNICODE: lambda: push(self._take(number("<B")).decode()),
            pickle.EMPTY_DICT: lambda: push({}),
            pickle.EMPTY_LIST: lambda: push([]),
            pickle.EMPTY_TUPLE: lambda: push(()),
            pickle.TUPLE: lambda: push(tuple(self._to_mark())),
            pickle.TUPLE1: lambda: push(self._last(1)),
            pickle.TUPLE2: lambda: push(self._last(2)),
            pickle.TUPLE3: lambda: push(self._last(3)),
            pickle.APPEND: lambda: self._append([self.stack.pop()]),
            pickle.APPENDS: lambda: self._append(self._to_mark()),
            pickle.SETITEM: lambda: self._set_items(list(self._last(2))),
            pickle.SETITEMS: lambda: self._set_items(self._to_mark()),
            pickle.BINPUT: lambda: self._put(number("<B")),
            pickle.LONG_BINPUT: lambda: self._put(number("<I")),
            pickle.MEMOIZE: lambda: self._put(len(self.memo)),
            pickle.BINGET: lambda: push(self.memo[number("<B")]),
            pickle.LONG_BINGET: lambda: push(self.memo[number("<I")]),
            pickle.GLOBAL: lambda: self._global(f"{self._line()}.{self._line()}"),
            pickle.STACK_GLOBAL: lambda: self._global(".".join(self._last(2))),
            pickle.BINPERSID: lambda: push(self._storage(self.stack.pop())),
            pickle.REDUCE: lambda: self._reduce(*self._last(2)),
            pickle.BUILD: self._build,
        }

    def _take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self.data):
            raise CheckpointError(
                f"{self.where}: its pickle ends at byte {len(self.data)}, in the middle. Fetch it again."
            )
        result = self.data[self.position : end]
        self.position = end
        return result

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        end = self.data.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    def _protocol(self, version: int) -> None:
        if not 2 <= version <= 5:
            raise CheckpointError(f"{self.where}: pickle protocol {version} is not read; torch writes 2.")

    def _skip(self, nbytes: int) -> None:
        """Frames only say how much to read ahead."""

    def _last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        return taken

    def _to_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise TypeError("items are appended to what is no list")
        target.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("items are set in what is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | int):
                raise TypeError(f"a key is a {type(key).__name__}")
            if key in target:
                raise ValueError(f"the key {str(key)[:80]!r} appears twice")
            target[key] = value

    def _put(self, place: int) -> None:
        self.memo[place] = self.stack[-1]

    def _global(self, name: str) -> None:
        is_short = len(name) <= _MAX_NAME  # others are not kept: a few bytes of a pickle name them again and again
        is_storage = is_short and name.startswith("torch.") and name.endswith("Storage") and name.count(".") == 1
        if name not in _GLOBALS and not is_storage:
            raise CheckpointError(
                f"{self.where}: its pickle names {name[:120]!r}. Only tensors are read, and no code is run; convert "
                "the file to safetensors where you trust it."
            )
        self.stack.append(_Global(name))

    def _storage(self, given: Any) -> _Storage:
        kind, storage, key = given[:3]
        if len(given) != 5 or kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str):
            raise TypeError("a storage is not described as torch does")
        return _Storage(storage.name.removeprefix("torch."), key)

    def _reduce(self, function: Any, arguments: Any) -> None:
        name = function.name if isinstance(function, _Global) else None
        if name == _DICT and arguments == ():
            self.stack.append({})
        elif name == _PARAMETER and isinstance(arguments[0], StoredTensor):
            self.stack.append(arguments[0])
        elif name == _TENSOR and isinstance(arguments[0], _Storage):
            self.stack.append(self._tensor(*arguments[:4]))
        else:
            raise TypeError(f"{name or type(function).__name__} is called as torch does not call it")

    def _tensor(self, storage: _Storage, offset: Any, shape: Any, strides: Any) -> StoredTensor:
        if type(shape) is not tuple or type(strides) is not tuple:
            raise TypeError("the sizes and strides of a tensor are no tuples")
        if len(shape) != len(strides) or len(shape) > 32:
            raise ValueError(f"a tensor has {len(shape)} sizes and {len(strides)} strides")
        numbers = (offset, *shape, *strides)
        # What holds itself twice, again and again, takes few bytes here and no end of them as a text.
        if not all(type(number) is int for number in numbers):
            raise TypeError("the offset, sizes and strides of a tensor are no whole numbers")
        if not all(0 <= number < _MAX_ELEMENT for number in numbers):
            raise ValueError(f"a tensor has offset {offset}, shape {shape} and strides {strides}")
        return StoredTensor(storage.kind, storage.key, offset, shape, strides)

    def _build(self) -> None:
        # A state dict carries the versions of its modules as an attribute; no weight depends on it.
        _, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("a state is given to what is no dict")
